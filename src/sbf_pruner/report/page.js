"use strict";
// Ask a mark for its numbers, by pointer or by keyboard; put new parts in place on a live page.  The page is complete without it.
const tip = document.getElementById("tip"), pulse = document.getElementById("pulse");

function lines(mark) {
  if (mark.tipLines) return mark.tipLines;
  const table = mark.closest("section").querySelector("table"), row = table?.tBodies[0].rows[+mark.dataset.row];
  const head = [...(table?.tHead.rows[0].cells ?? [])].map((cell) => cell.textContent);
  const cells = row ? [...row.children].map((cell) => cell.textContent) : [];
  return (mark.tipLines = [`${mark.matches(".epoch") ? "epoch " : ""}${cells[0]}`, ...cells.slice(1).map((cell, i) => [head[i + 1], cell])]);
}
function show(mark, x, y) {
  const [first, ...rest] = lines(mark), name = document.createElement("strong");
  name.textContent = first;
  const pairs = document.createElement(rest.length && Array.isArray(rest[0]) ? "dl" : "div");
  for (const line of rest) {
    for (const [kind, text] of Array.isArray(line) ? [["dt", line[0]], ["dd", line[1]]] : [["p", line]]) {
      const element = document.createElement(kind);
      element.textContent = text;
      pairs.append(element);
    }
  }
  tip.replaceChildren(name, pairs);
  tip.hidden = false;
  const at = mark.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const px = x ?? at.left + at.width / 2, py = y ?? Math.max(at.top, 0);
  let left = px + 14;
  if (left + size.width > innerWidth - 8) left = Math.max(8, px - size.width - 14);
  const top = Math.min(Math.max(8, y === undefined ? py - size.height - 10 : py + 14), innerHeight - size.height - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}
function hide() { tip.hidden = true; }

function prepare(root) {
  root.querySelectorAll(".graph .box").forEach((box) => {
    const title = box.querySelector("title");
    if (!title) return;
    box.tipLines = title.textContent.split("\n");
    box.classList.add("hit");
    title.remove();
  });
  root.querySelectorAll("[data-marks]").forEach((figure) => {
    figure.querySelectorAll(".hit").forEach((mark, place) => {
      mark.setAttribute("tabindex", place ? "-1" : "0"); // one stop for the whole figure; arrows go on from there
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", lines(mark).map((line) => (Array.isArray(line) ? line.join(" ") : line)).join("; "));
    });
  });
}
const markOf = (event) => event.target.closest?.(".hit");
let pointer = null; // where it was last, unless a key was pressed since
function ask() {
  const mark = document.activeElement.matches(".hit:focus-visible") ? document.activeElement : null;
  const under = pointer && document.elementFromPoint(...pointer)?.closest(".hit");
  if (under) show(under, ...pointer); else if (mark) show(mark); else hide();
}
for (const kind of ["pointermove", "pointerdown"]) addEventListener(kind, (event) => { pointer = [event.clientX, event.clientY]; ask(); });
document.documentElement.addEventListener("pointerleave", () => { pointer = null; ask(); });
addEventListener("focusin", () => { if (document.activeElement.matches(":focus-visible")) { pointer = null; ask(); } });
addEventListener("scroll", ask, { passive: true, capture: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") return hide();
  const mark = markOf(event), figure = mark?.closest("[data-marks]");
  if (!figure || event.ctrlKey || event.metaKey || event.altKey) return;
  const marks = [...figure.querySelectorAll(".hit")], here = marks.indexOf(mark);
  const to = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: marks.length - 1,
    PageDown: here + 10, PageUp: here - 10 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  step(marks, mark, Math.min(Math.max(to, 0), marks.length - 1));
});
function step(marks, from, to) {
  from.setAttribute("tabindex", "-1");
  marks[to].setAttribute("tabindex", "0");
  marks[to].focus();
}

// -- live -----------------------------------------------------------------------------------------------

function replacePart(key, html) {
  const part = document.getElementById(key);
  if (!part) return;
  const open = new Set([...part.querySelectorAll("details[open]")].map((d) => d.dataset.key));
  const scrolled = [...part.querySelectorAll(".scroll")].map((e) => [e.scrollLeft, e.scrollTop]);
  const active = document.activeElement, focused = part.contains(active) ? [...part.querySelectorAll(".hit")].indexOf(active) : -1;
  const other = part.contains(active) && focused < 0 ? active.tagName : "";
  part.innerHTML = html; // from the page's own server, which escapes all text; the page's policy lets none of it run
  part.querySelectorAll("details").forEach((d) => { d.open = open.has(d.dataset.key); });
  part.querySelectorAll(".scroll").forEach((e, i) => { if (scrolled[i]) [e.scrollLeft, e.scrollTop] = scrolled[i]; });
  prepare(part);
  const marks = [...part.querySelectorAll(".hit")];
  if (focused >= 0 && marks.length) step(marks, marks[0], Math.min(focused, marks.length - 1));
  else if (other) part.querySelector(other.toLowerCase())?.focus({ preventScroll: true });
}
async function follow(address) {
  let seen = document.body.dataset.version, lost = 0;
  for (;;) {
    await new Promise((done) => setTimeout(done, document.hidden ? 4000 : 1000));
    let news;
    try {
      const answer = await fetch(`${address}?seen=${seen}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      news = await answer.json();
      lost = 0;
    } catch {
      if (++lost > 2) { pulse.textContent = "The run no longer answers: it was stopped. What was known last stays here."; return; }
      continue;
    }
    seen = news.version;
    const before = [scrollX, scrollY];
    for (const [key, html] of Object.entries(news.parts)) replacePart(key, html);
    scrollTo(...before);
    if (news.title) document.title = news.title;
    pulse.textContent = news.finished ? "The run has ended. This page is kept as report.html in the run folder." : "";
    if (news.finished) return;
  }
}
prepare(document);
if (document.body.dataset.live) follow(document.body.dataset.live);
