// The board of patches: the image and its map, on which a pointer (mouse, pen, touch) or the keyboard removes
// and restores patches. Runs once, when gradio has drawn the board; gradio passes `element`, `props`, `trigger`, `watch`.
//
// The browser keeps which patches are removed (`props.value`) and draws them at once. The server is asked for
// predictions afterwards ("input"), and never has to keep up with the pointer.
//
// props.panes: {image, map: data URLs or "", caption: text, rows, columns: the grid of patches}

const figures = [...element.querySelectorAll("figure")];
const panes = figures.map((figure) => figure.querySelector(".sg-pane"));
const gestures = new Map(); // by pointer: several fingers may tap at the same time
const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }; // row, column
let removed = new Set();
let cursor = 0; // the patch that the keyboard is at

function draw() {
  const { image, map, caption, rows, columns } = props.panes;
  const cells = [...removed].map((patch) => {
    const row = Math.floor(patch / columns);
    return `M${patch - row * columns} ${row}h1v1h-1z`;
  });
  element.querySelector(".sg-board").dataset.removed = removed.size;
  figures.forEach((figure, number) => {
    const source = number === 0 ? image : map;
    figure.hidden = !source;
    const img = figure.querySelector("img");
    if (img.getAttribute("src") !== source) img.setAttribute("src", source);
    if (number === 1) figure.querySelector("figcaption").textContent = caption;
    figure.querySelector("svg").setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    for (const path of figure.querySelectorAll("path.sg-gone")) path.setAttribute("d", cells.join(""));
  });
  element.querySelector(".sg-empty").hidden = Boolean(image);
}

function patchAt(pane, x, y) {
  const { rows, columns } = props.panes;
  const box = pane.getBoundingClientRect();
  const column = Math.floor(((x - box.left) / box.width) * columns);
  const row = Math.floor(((y - box.top) / box.height) * rows);
  return row < 0 || column < 0 || row >= rows || column >= columns ? null : row * columns + column;
}

// Every patch on the way from the last position: a quick drag has few events.
function extend(gesture, pane, x, y) {
  const { rows, columns } = props.panes;
  const box = pane.getBoundingClientRect();
  const distance = Math.hypot(((x - gesture.x) / box.width) * columns, ((y - gesture.y) / box.height) * rows);
  const count = Math.max(1, Math.ceil(distance * 4));
  for (let step = 1; step <= count; step++) {
    const part = step / count;
    const patch = patchAt(pane, gesture.x + (x - gesture.x) * part, gesture.y + (y - gesture.y) * part);
    if (patch === null || removed.has(patch) === gesture.remove) continue;
    gesture.changed.push(patch);
    if (gesture.remove) removed.add(patch);
    else removed.delete(patch);
  }
  gesture.x = x;
  gesture.y = y;
  draw();
}

function point(pane, patch) {
  const { columns } = props.panes;
  const mark = pane.querySelector(".sg-mark");
  mark.setAttribute("visibility", patch === null ? "hidden" : "visible");
  if (patch === null) return;
  mark.setAttribute("x", patch % columns);
  mark.setAttribute("y", Math.floor(patch / columns));
}

function send() {
  props.value = [...removed].sort((a, b) => a - b);
  trigger("input");
}

function moveTo(pane, patch) {
  const { columns } = props.panes;
  cursor = patch;
  point(pane, patch);
  const position = `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
  element.querySelector(".sg-spoken").textContent = `${position}: ${removed.has(patch) ? "removed" : "kept"}`;
}

function pressed(pane, event) {
  const { rows, columns } = props.panes;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === " " || event.key === "Enter") {
    if (!event.repeat) {
      if (!removed.delete(cursor)) removed.add(cursor);
      draw();
      send();
    }
  } else if (event.key in steps) {
    const [down, right] = steps[event.key];
    const row = Math.floor(cursor / columns) + down;
    const column = (cursor % columns) + right;
    if (row >= 0 && column >= 0 && row < rows && column < columns) cursor = row * columns + column;
  } else return;
  event.preventDefault(); // the page does not scroll
  moveTo(pane, cursor);
}

for (const pane of panes) {
  pane.addEventListener("keydown", (event) => pressed(pane, event));
  pane.addEventListener("focus", () => {
    if (pane.matches(":focus-visible")) moveTo(pane, cursor); // not after a click
  });
  pane.addEventListener("blur", () => point(pane, null));
  pane.addEventListener("pointerdown", (event) => {
    const patch = patchAt(pane, event.clientX, event.clientY);
    if (event.button !== 0 || patch === null) return;
    event.preventDefault();
    pane.setPointerCapture(event.pointerId);
    cursor = patch;
    const gesture = { remove: !removed.has(patch), changed: [], x: event.clientX, y: event.clientY };
    gestures.set(event.pointerId, gesture);
    extend(gesture, pane, event.clientX, event.clientY);
  });
  pane.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse") point(pane, patchAt(pane, event.clientX, event.clientY));
    const gesture = gestures.get(event.pointerId);
    if (gesture) extend(gesture, pane, event.clientX, event.clientY);
  });
  pane.addEventListener("pointerup", (event) => {
    if (!gestures.delete(event.pointerId)) return;
    send();
  });
  // the finger scrolls the page: it did not mean the patches under it
  pane.addEventListener("pointercancel", (event) => {
    const gesture = gestures.get(event.pointerId);
    if (!gestures.delete(event.pointerId)) return;
    for (const patch of gesture.changed) {
      if (gesture.remove) removed.delete(patch);
      else removed.add(patch);
    }
    draw();
  });
  pane.addEventListener("pointerleave", () => point(pane, null));
  pane.addEventListener("dragstart", (event) => event.preventDefault());
}

function show() {
  if (gestures.size === 0) removed = new Set(props.value || []);
  if (cursor >= props.panes.rows * props.panes.columns) cursor = 0; // of another image
  draw();
}

watch(["value", "panes"], show);
show();
