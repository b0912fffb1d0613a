(() => {
  const data = JSON.parse(document.getElementById("fxmem-data").textContent);
  const ns = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);
  const row = (node) => (node < 0 ? null : $("n" + node));
  const drawn = typeof fxmemView === "undefined" ? null : fxmemView;
  const boxOf = (node) => (node < 0 || !drawn ? null : drawn.boxOf(node));
  const { bytes } = fxmemGraph;

  // What is linked: one node, shown on the timeline, in the graph and in the table.
  let linked = [], last = -1;
  const link = (node) => {
    last = node;
    linked.forEach((each) => each.classList.remove("linked"));
    linked = [row(node), boxOf(node)].filter(Boolean);
    linked.forEach((each) => each.classList.add("linked"));
  };
  if (drawn) drawn.onDraw(() => link(last));
  const within = (box, place) => {
    const a = box.getBoundingClientRect(), b = place.getBoundingClientRect();
    if (a.top < b.top || a.bottom > b.bottom) place.scrollTop += a.top - b.top - (b.height - a.height) / 2;
    if (a.left < b.left || a.right > b.right) place.scrollLeft += a.left - b.left - (b.width - a.width) / 2;
  };

  // The timeline.
  const plot = $("plot"), readout = $("readout"), graph = $("graph-box");
  const panels = [...document.querySelectorAll("#plot .panel")].filter((panel) => panel.id.endsWith("-step")).map((panel) => {
    const number = (key) => Number(panel.dataset[key]);
    const cursor = document.createElementNS(ns, "path"), spans = document.createElementNS(ns, "g");
    cursor.setAttribute("class", "cursor");
    spans.setAttribute("pointer-events", "none");
    cursor.setAttribute("pointer-events", "none");
    panel.append(spans, cursor);
    return { svg: panel.ownerSVGElement, left: number("left"), width: number("width"), top: number("top"), height: number("height"), cursor, spans };
  });
  const drawSpans = (nodes) => panels.forEach((panel) => {
    panel.spans.replaceChildren();
    for (const node of nodes.slice(0, 200)) {
      for (const [begin, end] of data.spans[node] || []) {
        const mark = document.createElementNS(ns, "rect");
        mark.setAttribute("class", "span");
        mark.setAttribute("x", panel.left + (panel.width * begin) / data.ticks);
        mark.setAttribute("y", panel.top);
        mark.setAttribute("width", Math.max((panel.width * (end - begin)) / data.ticks, 1));
        mark.setAttribute("height", panel.height);
        panel.spans.append(mark);
      }
    }
  });
  let at = data.start;
  const anchor = (words, target) => {
    const a = document.createElement("a");
    a.href = "#" + target;
    a.textContent = words;
    return a;
  };
  const say = (sentence, node) => {
    readout.textContent = sentence;
    if (row(node)) readout.append(" ", anchor("in the table", "n" + node));
    if (boxOf(node)) readout.append(" ", anchor("in the graph", boxOf(node).id));
  };
  const show = (index, silent) => {
    at = Math.max(0, Math.min(data.tick.length - 1, index));
    const tick = data.tick[at], node = data.node[at];
    panels.forEach((panel) => {
      const x = panel.left + (panel.width * (tick + 0.5)) / data.ticks;
      panel.cursor.setAttribute("d", `M${x} ${panel.top}v${panel.height}`);
    });
    const kinds = data.kinds.map(([name, values]) => [name, values[at] * 1024]).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
    const where = node < 0 ? "" : `; ${row(node).dataset.name}, ${data.during[at] ? "during" : "after"} ${data.names[data.op[at]]}`;
    const split = kinds.slice(0, 4).map(([name, n]) => `${name} ${bytes(n)}`).join(", ");
    const phase = (data.phases.find(([, begin, end]) => begin <= tick && tick < end) || ["before the step"])[0];
    const sentence = `Tick ${tick.toLocaleString("en")} of ${data.ticks.toLocaleString("en")}, ${phase}: ${bytes(data.live[at])} alive (${split})${where}.`;
    plot.setAttribute("aria-valuenow", at);
    plot.setAttribute("aria-valuetext", sentence);
    link(node);
    drawSpans([]);
    if (boxOf(node)) drawn.show(boxOf(node));
    if (!silent) say(sentence, node);
  };
  const seek = (tick) => {
    let low = 0, high = data.tick.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.begin[middle] <= tick) low = middle; else high = middle - 1;
    }
    return low;
  };
  const point = (event) => {
    const panel = panels.find((each) => each.svg.contains(event.target));
    if (!panel) return;
    const box = panel.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * panel.svg.viewBox.baseVal.width;
    show(seek(((x - panel.left) / panel.width) * data.ticks));
  };
  if (plot && data.tick.length) {
    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    plot.setAttribute("aria-valuemin", 0);
    plot.setAttribute("aria-valuemax", data.tick.length - 1);
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("keydown", (event) => {
      const page = Math.ceil(data.tick.length / 20);
      const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - page, PageUp: at + page,
        Home: 0, End: data.tick.length - 1, p: data.start }[event.key];
      if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(to);
    });
    show(data.start, true);
  }

  // A node, from the graph or the table.
  const pick = (node, also) => {
    link(node);
    drawSpans(also || [node]);
    const sums = row(node) ? row(node).dataset.name : "";
    const one = (n) => n.toLocaleString("en");
    const spans = (data.spans[node] || []).map(([begin, end]) => (end - begin < 2 ? one(begin) : `${one(begin)} to ${one(end - 1)}`)).join(" and ");
    say(`${sums}: ${spans ? "runs at tick " + spans : "runs no operator"}${also && also.length > 1 ? `; one of ${also.length} nodes in its box` : ""}.`, node);
  };
  if (graph) {
    const nodesAt = (event) => { const found = event.target.closest(".box"); return found && drawn.nodes(found); };
    graph.addEventListener("pointerover", (event) => { const found = nodesAt(event); if (found) pick(found[0], found); });
    graph.addEventListener("click", (event) => { const found = nodesAt(event); if (found) go(found[0]); });
  }

  // Tables: sorting by any column, and search.
  const value = (cell) => (cell.dataset.v === undefined ? cell.textContent : cell.dataset.v);
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const numeric = head.dataset.sort === "number";
        const before = head.getAttribute("aria-sort");
        const down = before ? before === "ascending" : numeric;
        const sign = down ? -1 : 1;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = [...body.rows].map((each) => [value(each.cells[column]), each]);
        keyed.sort(([a], [b]) => {
          if (a === "" || b === "") return (a === "") - (b === "");
          return sign * (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
        });
        body.append(...keyed.map(([, each]) => each));
        if (body === nodes) roving(body);
      });
    });
  }
  const roving = (body) => {
    const rows = [...body.rows].filter((each) => !each.hidden);
    [...body.rows].forEach((each) => { each.tabIndex = -1; });
    if (rows.length) rows[0].tabIndex = 0;
  };
  const search = $("search"), nodes = $("rows"), status = $("search-status");
  const texts = new Map();
  const inside = (path, module) => (path.toLowerCase() + ".").startsWith(module + ".");
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const each of nodes.rows) {
      if (words.length && !texts.has(each)) texts.set(each, each.textContent.toLowerCase());
      each.hidden = !words.every((word) => (word.startsWith("module:") ? inside(each.dataset.module, word.slice(7)) : texts.get(each).includes(word)));
      shown += each.hidden ? 0 : 1;
    }
    status.textContent = `${shown.toLocaleString("en")} of ${nodes.rows.length.toLocaleString("en")} nodes`;
    roving(nodes);
  };
  const go = (node) => {
    const found = row(node);
    if (!found) return;
    if (found.hidden) { search.value = ""; filter(); }
    found.focus({ preventScroll: false });
    within(found, $("rows-box"));
  };
  document.querySelectorAll(".tools").forEach((each) => { each.hidden = false; });
  search.addEventListener("input", filter);
  roving(nodes);
  const number = (each) => Number(each.id.slice(1));
  nodes.addEventListener("pointerover", (event) => { const found = event.target.closest("tr"); if (found) pick(number(found)); });
  nodes.addEventListener("focusin", (event) => { const found = event.target.closest("tr"); if (found) pick(number(found)); });
  nodes.addEventListener("keydown", (event) => {
    const found = event.target.closest("tr");
    if (!found) return;
    const rows = [...nodes.rows].filter((each) => !each.hidden), here = rows.indexOf(found);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: rows.length - 1, PageDown: here + 20, PageUp: here - 20 }[event.key];
    if (event.key === "Enter" && boxOf(number(found)) && graph) {
      graph.focus();
      graph.scrollIntoView({ block: "nearest" });
      drawn.show(boxOf(number(found)));
    }
    if (to === undefined) return;
    event.preventDefault();
    const next = rows[Math.max(0, Math.min(rows.length - 1, to))];
    found.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  // Cells of the modules' picture: one stop of the Tab key, arrows from there.
  for (const picture of document.querySelectorAll("#modules-wide, #modules-narrow")) {
    const all = [...picture.querySelectorAll(".cell")], cells = all;
    const extents = all.map((cell) => [...cell.querySelectorAll("rect")].map((each) => [Number(each.getAttribute("x")), Number(each.getAttribute("width"))]));
    const whole = extents.length ? extents[0][0] : [0, 1];
    let zoomed = 0;
    // The cell as wide as the picture, what is inside it below, and what is around it above.
    const zoomTo = (index) => {
      zoomed = index === zoomed ? 0 : index;
      const [from, wide] = extents[zoomed][0], scale = whole[1] / wide, end = whole[0] + whole[1];
      all.forEach((cell, place) => {
        const box = cell.querySelector(".box");
        let room = 0, left = 0;
        cell.querySelectorAll("rect").forEach((each, number) => {
          const [x, width] = extents[place][number], start = Math.max(whole[0] + (x - from) * scale, whole[0]), stop = Math.min(whole[0] + (x + width - from) * scale, end);
          each.setAttribute("x", start);
          each.setAttribute("width", Math.max(stop - start, 0));
          if (each === box) { room = stop - start - 8; left = start + 4; }
        });
        cell.style.display = room + 8 > 0.3 ? "" : "none";
        let words = cell.querySelector("text");
        if (!words) { words = document.createElementNS(ns, "text"); words.setAttribute("y", Number(box.getAttribute("y")) + 14); cell.append(words); }
        words.setAttribute("x", left);
        words.textContent = cell.dataset.label;
        const length = words.getComputedTextLength(), fits = Math.floor((cell.dataset.label.length * room) / Math.max(length, 1));
        if (length > room) words.textContent = fits > 4 ? cell.dataset.label.slice(0, fits - 1) + "\u2026" : "";
      });
    };
    const find = (each) => {
      zoomTo(all.indexOf(each));
      search.value = each.dataset.module && zoomed ? "module:" + each.dataset.module : "";
      filter();
    };
    cells.forEach((each, index) => {
      each.setAttribute("tabindex", index ? -1 : 0);
      each.setAttribute("role", "button");
      each.addEventListener("click", () => find(each));
      each.addEventListener("keydown", (event) => {
        const to = { ArrowLeft: index - 1, ArrowUp: index - 1, ArrowRight: index + 1, ArrowDown: index + 1, Home: 0, End: cells.length - 1 }[event.key];
        const next = cells[Math.max(0, Math.min(cells.length - 1, to))];
        if (event.key === "Enter" || event.key === " ") find(each);
        else if (to === undefined) return;
        else { each.setAttribute("tabindex", -1); next.setAttribute("tabindex", 0); next.focus(); }
        event.preventDefault();
      });
    });
    if (cells.length) picture.setAttribute("role", "group");
  }
  // A link to a row that a search has hidden, or to a box outside what the graph shows, still arrives.
  document.addEventListener("click", (event) => {
    const a = event.target.closest && event.target.closest('a[href^="#"]');
    if (!a) return;
    const target = $(a.getAttribute("href").slice(1));
    if (target && target.parentElement === nodes) { event.preventDefault(); go(number(target)); }
    if (target && graph && graph.contains(target)) { event.preventDefault(); graph.focus(); graph.scrollIntoView({ block: "nearest" }); drawn.show(target); }
  });
})();
