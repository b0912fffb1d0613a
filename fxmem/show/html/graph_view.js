// The graph of a page, live: zoom, pan, fold, find, and the choice of what colours it.
const fxmemView = (() => {
  const holder = document.getElementById("fxmem-graph-data"), stage = document.getElementById("graph-box");
  if (!holder || !stage) return null;
  const G = fxmemGraph, $ = (id) => document.getElementById(id), ns = "http://www.w3.org/2000/svg";
  const { parts, lines, home, heats } = JSON.parse(holder.textContent);
  const names = Object.keys(heats), opened = new Set(parts.flatMap((part, index) => (part.open ? [index] : [])));
  const first = new Set(opened), around = G.around(parts), nodesOf = new Map();
  home.forEach((part, node) => { for (let at = part; at >= 0; at = around[at]) nodesOf.set(at, [...(nodesOf.get(at) || []), node]); });
  const make = (tag, attributes, ...content) => {
    const made = document.createElementNS(ns, tag);
    for (const [name, value] of Object.entries(attributes || {})) if (value !== undefined && value !== "") made.setAttribute(name, value);
    made.append(...content);
    return made;
  };
  const text = (x, y, words, classes) => make("text", { x, y, class: classes }, words);
  const svg = make("svg", { class: "fxmem-graph", role: "group", "aria-label": "The graph" }), layer = make("g");
  const style = stage.querySelector("style"), head = make("path", { d: "M0 0.8L8 4L0 7.2z" });
  svg.append(style, make("defs", {}, make("marker", { id: "live-arrow", class: "tip", viewBox: "0 0 8 8", refX: 7.5, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, head)), layer);
  const map = $("minimap"), found = new Set(), listeners = [];
  let heat = 0, seen = null, layout = null, view = null, elements = new Map(), wanted = [], next = 0;

  // --- drawing
  const rect = ([x, y, width, height], classes, rx) => make("rect", { x, y, width, height, class: classes, rx });
  const tooltip = (part) => make("title", {}, [part.path || part.title, part.title, ...part.lines, part.mark || "", ...names.map((name, index) => `${heats[name]}: ${G.figure(name, part.values[index])}`)].filter((line, index, all) => line && all.indexOf(line) === index).join("\n"));
  const drawBox = (part, index, place, largest) => {
    const value = part.values[heat], kind = part.kind, [x, y, width, height] = place, drawn = [];
    if (part.alike) drawn.push(rect([x + 4, y + 4, width, height], "shape", 4));
    drawn.push(tooltip(part), rect(place, "shape", 4), text(x + 7, y + 19, (part.size ? "+ " : "") + part.title, "strong"));
    if (value || !["alias", "input", "output", "step"].includes(kind)) drawn.push(text(x + width - 7, y + 19, G.figure(names[heat], value), value ? "strong end" : "none end"));
    part.lines.forEach((line, row) => drawn.push(text(x + 7, y + 33 + 14 * row, line, "note")));
    if (part.mark) drawn.push(text(x + 7, y + 33 + 14 * part.lines.length, part.mark, "note strong"));
    if (value && largest) drawn.push(make("path", { class: "amount", d: `M${x + 7} ${y + height - 8}h${Math.max((width - 14) * value / largest, 1)}v5h${-Math.max((width - 14) * value / largest, 1)}z` }));
    if (part.again) {
      const long = Math.max(height * part.again, 10), stripes = Array.from({ length: Math.max(Math.ceil((long - 5) / 5), 0) }, (_, row) => `M${x - 7} ${y + 5 + 5 * row}l5 -5`);
      drawn.push(make("path", { class: "again", d: `M${x - 7} ${y}h5v${long}h-5z${stripes.join("")}` }));
    }
    const classes = ["box", kind, `h${value === null ? "u" : G.shade(value, largest)}`, part.mark ? "peak" : "", part.size ? "folds" : ""];
    const box = make("g", { id: part.id, class: classes.filter(Boolean).join(" "), tabindex: -1, role: "button", "aria-label": `${part.title}, ${G.figure(names[heat], value)}${part.mark ? ", " + part.mark : ""}`, "aria-expanded": part.size ? "false" : undefined }, ...drawn);
    box.dataset.part = index;
    return box;
  };
  const drawHeading = (part, index, [x, y, width]) => {
    const name = make("tspan", { class: "strong" }, "\u2212 " + part.head), value = part.values[heat];
    const note = make("tspan", { class: "muted", dx: 8 }, [part.note, G.figure(names[heat], value)].filter(Boolean).join(", "));
    const heading = make("g", { id: part.id, class: part.region ? "heading checkpoint folds" : "heading folds", tabindex: -1, role: "button", "aria-expanded": "true", "aria-label": `${part.head}, fold` },
      make("rect", { class: "behind", x: x + 5, y: y + 5, width: Math.min(part.least - 10, width - 10), height: 13.5 }), make("text", { x: x + 8, y: y + 16 }, name, note));
    heading.dataset.part = index;
    return heading;
  };
  const drawLine = ([tail, head, kind], way) => {
    const [start, ...rest] = way.points, all = rest.map((point) => point.join(" ")), d = `M${start.join(" ")}${way.curved ? "C" + all.join(" ") : "L" + all.join("L")}`;
    const classes = make("g", { class: `edge ${kind}` }, make("path", { d, "marker-end": "url(#live-arrow)" }));
    classes.dataset.ends = `${tail} ${head}`;
    return classes;
  };
  const draw = () => {
    seen = G.visible(parts, opened);
    const joined = G.edges(parts, lines, seen), box = stage.getBoundingClientRect();
    layout = G.arrange(seen.boxes.map(({ part, frame }) => ({ w: parts[part].w, h: parts[part].h, frame })), seen.frames.map(({ part, parent }) => ({ least: parts[part].least, parent })), joined, [Math.max(box.width, 200), Math.max(box.height, 200)]);
    const largest = Math.max(0, ...seen.boxes.map(({ part }) => parts[part].values[heat] || 0));
    const frames = seen.frames.map(({ part }, index) => make("g", { class: parts[part].region ? "frame checkpoint" : "frame" }, rect(layout.frames[index], "", 6)));
    const headings = seen.frames.map(({ part }, index) => drawHeading(parts[part], part, layout.frames[index]));
    const ways = joined.flatMap((line, index) => (layout.lines[index] ? [drawLine(line, layout.lines[index])] : []));
    const boxes = seen.boxes.map(({ part }, index) => drawBox(parts[part], part, layout.boxes[index], largest));
    layer.replaceChildren(...frames, ...ways, ...headings, ...boxes);
    elements = new Map([...headings, ...boxes].map((each) => [Number(each.dataset.part), each]));
    (boxes[0] || svg).setAttribute("tabindex", 0);
    svg.dataset.boxes = boxes.length;
    map.replaceChildren(...layout.frames.map((place) => rect(place, "mapped")), ...boxes.map((each, index) => make("g", { class: each.getAttribute("class") }, rect(layout.boxes[index], "shape"))), rect([0, 0, 0, 0], "here"));
    map.setAttribute("viewBox", `-10 -10 ${layout.width + 20} ${layout.height + 20}`);
    mark();
    listeners.forEach((each) => each());
  };

  // --- zoom and pan
  const aspect = () => { const box = stage.getBoundingClientRect(); return Math.max(box.height, 1) / Math.max(box.width, 1); };
  const look = (to) => {
    view = to;
    svg.setAttribute("viewBox", view.map((each) => each.toFixed(2)).join(" "));
    const here = map.querySelector(".here");
    ["x", "y", "width", "height"].forEach((name, index) => here && here.setAttribute(name, view[index]));
    const all = view[0] <= 0 && view[1] <= 0 && view[0] + view[2] >= layout.width && view[1] + view[3] >= layout.height;
    map.classList.toggle("idle", all);
  };
  const fit = () => look(G.whole(layout.width, layout.height, aspect()));
  const at = (event) => { const box = svg.getBoundingClientRect(); return [view[0] + ((event.clientX - box.left) / box.width) * view[2], view[1] + ((event.clientY - box.top) / box.height) * view[3]]; };
  const middle = () => [view[0] + view[2] / 2, view[1] + view[3] / 2];
  const zoom = (factor, point) => {
    const wide = view[2] / factor;
    if (wide > 40 && wide < 20 * Math.max(layout.width, layout.height, 500)) look(G.zoom(view, factor, point || middle()));
  };
  const pan = (dx, dy) => look([view[0] + dx, view[1] + dy, view[2], view[3]]);
  const centre = (index) => {
    const element = elements.get(index);
    if (!element) return;
    const box = element.getBBox(), inside = box.x >= view[0] && box.y >= view[1] && box.x + box.width <= view[0] + view[2] && box.y + box.height <= view[1] + view[3];
    if (!inside) look([box.x + box.width / 2 - view[2] / 2, box.y + box.height / 2 - view[3] / 2, view[2], view[3]]);
  };

  // --- folding and finding
  const represent = (part) => { let stands = part; for (let up = part; up >= 0; up = around[up]) if (up !== part && !opened.has(up)) stands = up; return stands; };
  const mark = () => {
    found.clear();
    wanted.forEach((part) => found.add(represent(part)));
    elements.forEach((element, part) => element.classList.toggle("found", found.has(part)));
  };
  const toggle = (index, focus) => {
    if (!parts[index].size) return;
    if (opened.has(index)) opened.delete(index); else opened.add(index);
    draw();
    fit();
    if (focus && elements.get(index)) elements.get(index).focus({ preventScroll: true });
  };
  const reveal = (part) => {
    let folded = false;
    for (let up = around[part]; up >= 0; up = around[up]) if (!opened.has(up)) { opened.add(up); folded = true; }
    if (folded) { draw(); fit(); }
    centre(part);
  };
  const find = () => {
    wanted = G.matches(parts, $("find").value);
    next = 0;
    mark();
    $("find-status").textContent = $("find").value.trim() ? `${wanted.length} found, in ${found.size} boxes` : "";
  };

  // --- what people do
  stage.replaceChildren(svg);
  stage.classList.add("live");
  map.removeAttribute("hidden");
  const choice = $("heat");
  choice.append(...names.map((name, index) => { const option = document.createElement("option"); option.value = index; option.textContent = `${name === "peak" ? "at peak" : name}: ${heats[name]}`; return option; }));
  choice.addEventListener("change", () => { heat = Number(choice.value); draw(); look(view); });
  $("zoom-in").addEventListener("click", () => zoom(1.4));
  $("zoom-out").addEventListener("click", () => zoom(1 / 1.4));
  $("zoom-fit").addEventListener("click", fit);
  $("fold-again").addEventListener("click", () => { opened.clear(); first.forEach((each) => opened.add(each)); draw(); fit(); });
  $("find").addEventListener("input", find);
  $("find").addEventListener("keydown", (event) => { if (event.key === "Enter" && wanted.length) { reveal(wanted[next % wanted.length]); next += 1; event.preventDefault(); } });
  svg.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { zoom(Math.exp(-event.deltaY / 300), at(event)); event.preventDefault(); } }, { passive: false });
  const pointers = new Map();
  let moved = 0;
  const apart = () => { const [a, b] = [...pointers.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
  svg.addEventListener("pointerdown", (event) => { if (!pointers.size) moved = 0; pointers.set(event.pointerId, event); });
  svg.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const gap = pointers.size > 1 ? apart() : 0, scale = view[2] / svg.getBoundingClientRect().width;
    pointers.set(event.pointerId, event);
    moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    if (moved > 4) svg.setPointerCapture(event.pointerId);
    if (gap) zoom(apart() / gap, at(event)); else if (moved > 4) pan((before.clientX - event.clientX) * scale, (before.clientY - event.clientY) * scale);
  });
  const release = (event) => pointers.delete(event.pointerId);
  ["pointerup", "pointercancel", "pointerleave"].forEach((name) => svg.addEventListener(name, release));
  svg.addEventListener("click", (event) => {
    if (moved > 4) { event.stopPropagation(); return; }
    const each = event.target.closest(".folds");
    if (each) { event.stopPropagation(); toggle(Number(each.dataset.part)); }
  });
  map.addEventListener("pointerdown", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse());
    look([point.x - view[2] / 2, point.y - view[3] / 2, view[2], view[3]]);
  });
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const each = event.target.closest("[data-part]"), step = view[2] / 10, order = [...elements.keys()].sort((a, b) => a - b);
    const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") fit();
    else if (event.key === "Escape" && each) stage.focus();
    else if (each && (event.key === "Enter" || event.key === " ")) { if (parts[each.dataset.part].size) toggle(Number(each.dataset.part), true); else each.dispatchEvent(new MouseEvent("click", { bubbles: true })); }
    else if (each && move) {
      const to = order[Math.max(0, Math.min(order.length - 1, order.indexOf(Number(each.dataset.part)) + move))];
      each.setAttribute("tabindex", -1);
      elements.get(to).setAttribute("tabindex", 0);
      elements.get(to).focus({ preventScroll: true });
      centre(to);
    } else if (move) pan(event.key === "ArrowLeft" ? -step : event.key === "ArrowRight" ? step : 0, event.key === "ArrowUp" ? -step : event.key === "ArrowDown" ? step : 0);
    else return;
    event.preventDefault();
  });
  let width = 0;
  new ResizeObserver(() => { const now = stage.getBoundingClientRect().width; if (Math.abs(now - width) > 1) { width = now; draw(); fit(); } }).observe(stage);
  width = stage.getBoundingClientRect().width;
  draw();
  fit();
  const boxOf = (node) => (home[node] >= 0 ? elements.get(represent(home[node])) || null : null);
  return { boxOf, nodes: (element) => nodesOf.get(Number(element.dataset.part)) || null, show: (element) => centre(Number(element.dataset.part)), onDraw: (each) => listeners.push(each) };
})();
