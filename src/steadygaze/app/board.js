// The board of patches: the image and its map, on which a pointer (mouse, pen, touch) removes and restores
// patches. Runs once, when gradio has drawn the board; gradio passes `element`, `props`, `trigger`, `watch`.
//
// The browser keeps which patches are removed (`props.value`) and draws them at once. The server is asked for
// predictions afterwards ("input"), and never has to keep up with the pointer.
//
// props.panes: {image, map: data URLs or "", caption: text, rows, columns: the grid of patches}

const figures = [...element.querySelectorAll("figure")];
const panes = figures.map((figure) => figure.querySelector(".sg-pane"));
const gestures = new Map(); // by pointer: several fingers may tap at the same time
let removed = new Set();

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
  const steps = Math.max(1, Math.ceil(distance * 4));
  for (let step = 1; step <= steps; step++) {
    const part = step / steps;
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

for (const pane of panes) {
  pane.addEventListener("pointerdown", (event) => {
    const patch = patchAt(pane, event.clientX, event.clientY);
    if (event.button !== 0 || patch === null) return;
    event.preventDefault();
    pane.setPointerCapture(event.pointerId);
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
    props.value = [...removed].sort((a, b) => a - b);
    trigger("input");
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
  draw();
}

watch(["value", "panes"], show);
show();
