// The page without a server: an image, a method and a number of removed patches choose what is shown, all of it from
// the data in the page. The board is the one of `steadygaze app`: `patchBoard` is board.js, and takes what gradio gives it.
//
// data: {rows, columns, unit, methods: [{name, about}],
//   images: [{name, image: data URL, classes: names, explained: class, chance: [p of each k],
//             maps: [{map: data URL, order: patches, explained: [p of each k], top: [[class, p, class, p, ...] of each k]}]}]}
// p: probability of the explained class in units of data.unit; class: index in `classes`

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const patches = data.rows * data.columns;
const plot = { left: 44, right: 392, top: 10, bottom: 190 }; // in the SVG of the curves
let chosenImage = 0;
let chosenMethod = 0;
let removed = Math.round(patches / 10);
let timer = null;

// -- the board

const watchers = [];
const props = { value: [], panes: { image: "", map: "", caption: "", rows: 1, columns: 1 } };
patchBoard($("board"), props, clicked, (names, changed) => watchers.push(changed));

function current() {
  const image = data.images[chosenImage];
  return { image, map: image.maps[chosenMethod], method: data.methods[chosenMethod] };
}

// The user removed or restored patches: up to the dimmest one that was removed, or from the brightest one restored.
function clicked() {
  const { order } = current().map;
  const before = new Set(order.slice(0, removed));
  const after = new Set(props.value);
  const ranks = order.map((patch, rank) => (before.has(patch) === after.has(patch) ? null : rank));
  const changed = ranks.filter((rank) => rank !== null);
  if (changed.length === 0) return;
  const grown = after.size > before.size;
  remove(grown ? changed[changed.length - 1] + 1 : changed[0]);
}

// -- what is shown

function percent(p) {
  const share = 100 * p * data.unit;
  return `${share >= 1 && share < 99 ? share.toFixed(0) : share.toFixed(1)}\u00a0%`; // no line ends before %
}

function show() {
  const { image, map, method } = current();
  props.panes = { image: image.image, map: map.map, caption: method.name, rows: data.rows, columns: data.columns };
  props.value = map.order.slice(0, removed);
  for (const changed of watchers) changed();
  const explained = image.classes[image.explained];
  const [before, after] = [map.explained[0], map.explained[removed]];
  const [now, p] = map.top[removed];
  const verb = now === image.explained ? "still predicts" : "now predicts";
  $("summary").textContent =
    `${removed} of ${patches} patches removed. The model ${verb} ${image.classes[now]} (${percent(p)}). ` +
    `${explained}: ${percent(before)} → ${percent(after)}; chance: ${percent(image.chance[removed])}.`;
  $("about").textContent = `${method.name}: ${method.about}`;
  $("slider").value = removed;
  $("slider").setAttribute("aria-valuetext", `${removed} of ${patches}`);
  $("count").textContent = `${removed} of ${patches}`;
  $("explained").textContent = explained;
  $("line").textContent = method.name;
  $("classes").replaceChildren(...listed(image, map).map(([index, p]) => bar(image, index, p)));
  $("curves").replaceChildren(...curves(image, map));
}

// The most probable classes, and the explained one if it is not among them.
function listed(image, map) {
  const top = map.top[removed];
  const found = top.flatMap((item, at) => (at % 2 === 0 ? [[item, top[at + 1]]] : []));
  const explained = found.some(([index]) => index === image.explained);
  return explained ? found : [...found, [image.explained, map.explained[removed]]];
}

function bar(image, index, p) {
  const item = document.createElement("li");
  if (index === image.explained) item.className = "explained";
  item.innerHTML = "<span></span><span></span><i><b></b></i>";
  item.children[0].textContent = item.title = image.classes[index];
  item.children[1].textContent = percent(p);
  item.querySelector("b").style.width = `${100 * p * data.unit}%`;
  return item;
}

function svg(name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function curves(image, map) {
  const highest = Math.max(...image.chance, ...image.maps.flatMap((other) => other.explained)) * data.unit;
  const high = Math.min(1, Math.ceil(highest * 10 + 0.2) / 10); // the same axis for every method
  const x = (k) => plot.left + (k / patches) * (plot.right - plot.left);
  const y = (p) => plot.bottom - ((p * data.unit) / high) * (plot.bottom - plot.top);
  const points = (curve) => curve.map((p, k) => `${x(k).toFixed(1)},${y(p).toFixed(1)}`).join(" ");
  const nodes = [];
  for (const share of [0, high / 2, high]) {
    const at = y(share / data.unit);
    nodes.push(svg("line", { class: "grid", x1: plot.left, x2: plot.right, y1: at, y2: at }));
    const text = { x: plot.left - 7, y: at + 4, "text-anchor": "end" };
    nodes.push(svg("text", text, `${Math.round(100 * share)} %`));
  }
  for (const [k, anchor] of [[0, "start"], [Math.round(patches / 2), "middle"], [patches, "end"]]) {
    nodes.push(svg("text", { x: x(k), y: plot.bottom + 18, "text-anchor": anchor }, k));
  }
  const middle = { x: (plot.left + plot.right) / 2, y: plot.bottom + 36, "text-anchor": "middle" };
  nodes.push(svg("text", middle, "patches removed"));
  nodes.push(svg("line", { class: "at", x1: x(removed), x2: x(removed), y1: plot.top, y2: plot.bottom }));
  for (const [look, curve] of [["chance", image.chance], ["map", map.explained]]) {
    nodes.push(svg("polyline", { class: `line ${look}`, points: points(curve) }));
    nodes.push(svg("circle", { class: look, cx: x(removed), cy: y(curve[removed]), r: 5 }));
  }
  return nodes;
}

// -- choices

function remove(count) {
  removed = count;
  show();
}

function option(group, content, label, checked, chosen) {
  const input = Object.assign(document.createElement("input"), { type: "radio", name: group, checked });
  input.setAttribute("aria-label", label);
  input.addEventListener("change", () => {
    chosen();
    show();
  });
  const node = document.createElement("label");
  node.append(input, content);
  $(group).append(node);
}

function pause() {
  clearInterval(timer);
  timer = null;
  $("play").textContent = "▶ Play";
}

function play() {
  if (removed === patches) removed = 0;
  timer = setInterval(() => {
    remove(removed + 1);
    if (removed === patches) pause();
  }, 80);
  $("play").textContent = "❚❚ Pause";
}

data.images.forEach(({ name, image }, index) => {
  const thumbnail = Object.assign(document.createElement("img"), { src: image, alt: "", title: name });
  option("images", thumbnail, name, index === chosenImage, () => (chosenImage = index));
});
data.methods.forEach(({ name }, index) => {
  const button = Object.assign(document.createElement("span"), { textContent: name });
  option("methods", button, name, index === chosenMethod, () => (chosenMethod = index));
});
$("slider").addEventListener("input", (event) => {
  pause();
  remove(Number(event.target.value));
});
$("play").addEventListener("click", () => (timer === null ? play() : pause()));
$("board").addEventListener("pointerdown", pause, true);
$("board").addEventListener("keydown", pause, true);
show();
