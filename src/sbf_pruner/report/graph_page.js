"use strict";
// Pan, zoom, ask, search.  The drawing is complete without any of this.
const view = document.getElementById("view"), scene = document.getElementById("scene"), panel = document.getElementById("details");
const find = document.getElementById("find"), found = document.getElementById("found");
const boxes = [...document.querySelectorAll("#scene .box")], wires = [...document.querySelectorAll("#scene .wire")];
const size = { w: +scene.dataset.width, h: +scene.dataset.height };
const at = { x: 0, y: 0, k: 1 };
const resting = [...panel.childNodes];
let chosen = null, hits = [], hit = -1, fitted = true;

boxes.forEach((box) => {
  const title = box.querySelector("title");
  box.tip = title.textContent.split("\n");
  title.remove(); // the panel says it
  box.setAttribute("tabindex", "0");
  box.setAttribute("role", "button");
  box.setAttribute("aria-label", box.tip.join("; "));
});

function show() { fitted = false; scene.setAttribute("transform", `translate(${at.x} ${at.y}) scale(${at.k})`); }
function fit() {
  const { width, height } = view.getBoundingClientRect();
  at.k = Math.min(width / size.w, height / size.h, 1.4);
  at.x = (width - size.w * at.k) / 2;
  at.y = Math.max((height - size.h * at.k) / 2, 0);
  show();
  fitted = true;
}
function zoom(factor, x, y) {
  const { width, height } = view.getBoundingClientRect();
  const k = Math.min(Math.max(at.k * factor, 0.03), 6), cx = x ?? width / 2, cy = y ?? height / 2;
  at.x = cx - (cx - at.x) * (k / at.k);
  at.y = cy - (cy - at.y) * (k / at.k);
  at.k = k;
  show();
}
function bring(box) {
  const { width, height } = view.getBoundingClientRect(), b = box.getBBox();
  at.k = Math.max(at.k, 0.9);
  at.x = width / 2 - (b.x + b.width / 2) * at.k;
  at.y = height / 2 - (b.y + b.height / 2) * at.k;
  show();
}
function ask(box) {
  document.querySelectorAll(".near").forEach((e) => e.classList.remove("near"));
  view.classList.toggle("asked", !!box);
  if (!box) { panel.replaceChildren(...resting); return; }
  const id = box.id.slice(1), group = box.dataset.group;
  box.classList.add("near");
  wires.forEach((wire) => {
    const ends = wire.dataset.ends.split(" ");
    if (ends.includes(id)) {
      wire.classList.add("near");
      ends.forEach((end) => document.getElementById("b" + end).classList.add("near"));
    }
  });
  if (group) {
    const inside = (end) => document.getElementById("b" + end).dataset.group === group;
    boxes.forEach((other) => { if (other.dataset.group === group) other.classList.add("near"); });
    wires.forEach((wire) => { if (wire.dataset.ends.split(" ").every(inside)) wire.classList.add("near"); });
  }
  panel.replaceChildren(...box.tip.map((line, i) => {
    const element = document.createElement(i ? "p" : "h2");
    element.textContent = line;
    return element;
  }));
}
function choose(box) {
  chosen?.classList.remove("chosen");
  chosen = box;
  chosen?.classList.add("chosen");
  ask(chosen);
}
function search(step) {
  const words = find.value.trim().toLowerCase();
  const now = words ? boxes.filter((box) => box.tip[0].toLowerCase().includes(words)) : [];
  hit = step && now.length === hits.length && now.length ? (hit + step + now.length) % now.length : 0;
  hits = now;
  found.textContent = words ? (hits.length ? `${hit + 1} of ${hits.length}` : "none") : "";
  choose(hits[hit] || null);
  if (hits[hit]) bring(hits[hit]);
}

view.addEventListener("wheel", (event) => {
  event.preventDefault();
  const frame = view.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX - frame.left, event.clientY - frame.top);
}, { passive: false });
const fingers = new Map();
let moved = false;
view.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event); moved = false; });
window.addEventListener("pointerup", (event) => { fingers.delete(event.pointerId); view.classList.remove("moving"); });
window.addEventListener("pointercancel", (event) => fingers.delete(event.pointerId));
window.addEventListener("pointermove", (event) => {
  const before = fingers.get(event.pointerId);
  if (!before) return;
  const dx = event.clientX - before.clientX, dy = event.clientY - before.clientY;
  if (!moved && Math.hypot(dx, dy) < 4) return;
  moved = true;
  view.classList.add("moving");
  const other = [...fingers.values()].find((f) => f.pointerId !== event.pointerId);
  if (other) {
    const frame = view.getBoundingClientRect(), away = (f) => Math.hypot(f.clientX - other.clientX, f.clientY - other.clientY);
    zoom(away(event) / Math.max(away(before), 1), other.clientX - frame.left, other.clientY - frame.top);
  } else { at.x += dx; at.y += dy; show(); }
  fingers.set(event.pointerId, event);
});
view.addEventListener("click", (event) => { if (!moved) choose(event.target.closest(".box")); });
boxes.forEach((box) => {
  box.addEventListener("mouseenter", () => { if (!chosen && !fingers.size) ask(box); });
  box.addEventListener("mouseleave", () => { if (!chosen) ask(null); });
  box.addEventListener("focus", () => { if (box.matches(":focus-visible")) { choose(box); bring(box); view.scrollTo(0, 0); } });
});
find.addEventListener("input", () => search(0));
find.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); search(event.shiftKey ? -1 : 1); }
});
const keys = {
  "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: fit,
  ArrowLeft: () => { at.x += 60; show(); }, ArrowRight: () => { at.x -= 60; show(); },
  ArrowUp: () => { at.y += 60; show(); }, ArrowDown: () => { at.y -= 60; show(); },
  "/": () => find.focus(), d: () => theme(),
};
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { find.value = ""; search(0); document.activeElement.blur(); return; }
  if (event.target === find || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
function theme(to) {
  const root = document.documentElement;
  root.dataset.theme = to || (root.dataset.theme === "dark" ? "light" : "dark");
}
document.getElementById("theme").addEventListener("click", () => theme());
document.getElementById("fit").addEventListener("click", fit);
document.getElementById("nearer").addEventListener("click", () => zoom(1.25));
document.getElementById("farther").addEventListener("click", () => zoom(0.8));
window.addEventListener("resize", () => { if (fitted) fit(); });
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
fit();
