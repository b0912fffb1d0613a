"use strict";
// The graph of a page. The functions of `fxmemGraph` are pure; what follows them draws with them.
const fxmemGraph = (() => {
  const HEADING = 24, PAD = 10, BESIDE = 14, BELOW = 16, GUTTER = 30, LANE = 9, MOST_BESIDE = 3, TRIES = 8, MANY = 400, CORNER = 4, LEAVE = 8;
  const COLUMNS = [1, 1.15, 1.3, 1.5, 1.75, 2, 2.3, 2.6, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128];
  const MOST_READERS = 6, STEPS = 7;

  // Parts are in preorder: what is inside one follows it. `around` is the part around each, or -1.
  const around = (parts) => {
    const found = [], open = [];
    parts.forEach((part, index) => {
      while (open.length && index > open[open.length - 1][1]) open.pop();
      found.push(open.length ? open[open.length - 1][0] : -1);
      if (part.size) open.push([index, index + part.size]);
    });
    return found;
  };

  // What is drawn when these parts are open: boxes and frames in order, and for each part the box that stands for it.
  const visible = (parts, opened) => {
    const boxes = [], frames = [], box = [];
    const add = (first, last, frame) => {
      for (let index = first; index <= last; index += 1 + (parts[index].size || 0)) {
        const size = parts[index].size || 0;
        if (size && opened.has(index)) {
          frames.push({ part: index, parent: frame });
          box[index] = -1;
          add(index + 1, index + size, frames.length - 1);
        } else {
          for (let inner = index; inner <= index + size; inner += 1) box[inner] = boxes.length;
          boxes.push({ part: index, frame });
        }
      }
    };
    add(0, parts.length - 1, -1);
    return { boxes, frames, box };
  };

  // Lines between boxes. Of a box with many readers only the first remains; what has none left keeps its place.
  const edges = (parts, lines, seen) => {
    const readers = new Map();
    for (const [tail, head] of lines) {
      const one = seen.box[tail], other = seen.box[head];
      if (one < other) readers.set(one, (readers.get(one) || new Set()).add(other));
    }
    const found = [], joined = new Set(), heads = new Set(), cut = new Set();
    for (const [tail, all] of readers) {
      const sorted = [...all].sort((a, b) => a - b), kept = sorted.length > MOST_READERS ? sorted.slice(0, 1) : sorted;
      sorted.slice(kept.length).forEach((head) => cut.add(head));
      for (const head of kept) { found.push([tail, head, "data"]); joined.add(tail).add(head); heads.add(head); }
    }
    seen.boxes.forEach((box, index) => {
      const kind = parts[box.part].kind;
      if (index && !heads.has(index) && (cut.has(index) || !joined.has(index)) && kind !== "input") found.push([index - 1, index, kind === "step" ? "order" : "hidden"]);
    });
    return found.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  };

  // The layout of fxmem/show/graph/layout.py. boxes: {w, h, frame}; frames: {least, parent}; lines: [tail, head, kind].
  const arrange = (boxes, frames, lines, screen) => {
    const cell = (fields) => ({ cells: [], rows: [], lines: [], columns: [], options: [], top: 0, pad: 0, least: 0, row: 0, column: 0, ...fields });
    const root = cell({}), outer = frames.map((frame, index) => cell({ index, top: HEADING, pad: PAD, least: frame.least, isFrame: true }));
    outer.forEach((each, index) => { each.parent = frames[index].parent < 0 ? root : outer[frames[index].parent]; });
    const inner = boxes.map((box, index) => cell({ index, width: box.w, height: box.h, parent: box.frame < 0 ? root : outer[box.frame] }));
    const placed = new Set();
    for (const each of inner) {
      for (let at = each, up = each.parent; up; [at, up] = [up, up.parent]) {
        up.cells.push(at);
        if (up === root || placed.has(up)) break;
        placed.add(up);
      }
    }
    const chain = (at) => { const found = []; for (; at; at = at.parent) found.push(at); return found; };
    lines.forEach(([tail, head], index) => {
      const tails = chain(inner[tail]), heads = chain(inner[head]);
      while (tails[tails.length - 2] === heads[heads.length - 2]) { tails.pop(); heads.pop(); }
      tails[tails.length - 1].lines.push([index, tails[tails.length - 2], heads[heads.length - 2]]);
    });
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const rank = (at) => {
      const before = new Map(), ranked = [];
      for (const [, tail, head] of at.lines) before.set(head, [...(before.get(head) || []), tail]);
      for (const each of at.cells) {
        each.rank = Math.max(0, ...(before.get(each) || []).map((tail) => tail.rank + 1));
        (ranked[each.rank] = ranked[each.rank] || []).push(each);
        if (each.cells.length) rank(each);
      }
      ranked.forEach((row) => { for (let start = 0; start < row.length; start += MOST_BESIDE) at.rows.push(row.slice(start, start + MOST_BESIDE)); });
      at.rows.forEach((row, number) => row.forEach((each) => { each.row = number; }));
    };
    const tall = (at) => (at.cells.length ? at.top + sum(at.rows.map((row) => Math.max(...row.map(tall)))) + BELOW * Math.max(at.rows.length - 1, 0) + at.pad : at.height || 0);
    const breaks = (heights, cap) => {
      const ends = [];
      let filled = 0;
      heights.forEach((height, index) => {
        if (index && filled + BELOW + height > cap) { ends.push(index); filled = height; } else filled += height + (index ? BELOW : 0);
      });
      return heights.length ? [...ends, heights.length] : ends;
    };
    const size = (at, number) => (at.cells.length ? at.options[number] : [at.width, at.height]);
    const rowWidth = (widths) => sum(widths) + BESIDE * (widths.length - 1);
    const sized = (at, cap, number) => {
      const sizes = at.rows.map((row) => row.map((each) => size(each, number)));
      const heights = sizes.map((row) => Math.max(...row.map((each) => each[1]))), widths = sizes.map((row) => rowWidth(row.map((each) => each[0])));
      let width = 2 * at.pad - GUTTER, highest = 0, start = 0;
      for (const end of breaks(heights, cap - at.top - at.pad)) {
        width += Math.max(...widths.slice(start, end)) + GUTTER;
        highest = Math.max(highest, sum(heights.slice(start, end)) + BELOW * (end - start - 1));
        start = end;
      }
      return [Math.max(width, at.least), at.top + highest + at.pad];
    };
    const search = (at, caps, tries) => {
      at.cells.forEach((each) => { if (each.cells.length) search(each, caps, tries); });
      caps.forEach((cap, number) => {
        let best = null, chosen = null;
        for (let number2 = number; number2 < Math.min(number + tries, caps.length); number2 += 1) {
          const [width, height] = sized(at, cap, number2), high = height > cap;
          const key = [high ? 1 : 0, high ? height : width, high ? width : height, number2];
          const differs = best && key.findIndex((each, index) => each !== best[index]);
          if (!best || (differs >= 0 && key[differs] < best[differs])) { best = key; chosen = [width, height, number2]; }
        }
        at.options.push(chosen);
      });
    };
    const room = (column) => LANE * (Math.max(-1, ...column.lanes.values()) + 1);
    const lanes = (at) => {
      const taken = at.columns.map(() => []);
      at.lines.map(([index, tail, head]) => [head.row - tail.row, tail.row, head.row, index, tail.column, head.column])
        .filter(([span, , , , one, other]) => one === other && span > 1)
        .sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2] || a[3] - b[3])
        .forEach(([, first, last, index, column]) => {
          let lane = taken[column].findIndex((others) => others.every(([a, b]) => last < a || b < first));
          if (lane < 0) lane = taken[column].push([]) - 1;
          taken[column][lane].push([first, last]);
          at.columns[column].lanes.set(index, lane);
        });
    };
    const settle = (at, caps, number) => {
      at.cells.forEach((each) => { if (each.cells.length) settle(each, caps, at.options[number][2]); });
      const heights = at.rows.map((row) => Math.max(...row.map((each) => each.height)));
      let start = 0;
      for (const end of breaks(heights, caps[number] - at.top - at.pad)) {
        const rows = at.rows.slice(start, end);
        rows.forEach((row) => row.forEach((each) => { each.column = at.columns.length; }));
        at.columns.push({ rows, lanes: new Map(), width: Math.max(...rows.map((row) => rowWidth(row.map((each) => each.width)))), height: sum(heights.slice(start, end)) + BELOW * (end - start - 1) });
        start = end;
      }
      lanes(at);
      let x = at.pad;
      for (const column of at.columns) { column.x = x; x += column.width + room(column) + GUTTER; }
      at.width = Math.max(x - GUTTER + at.pad, at.least);
      at.height = at.top + Math.max(0, ...at.columns.map((column) => column.height)) + at.pad;
    };
    const place = (at, x, y) => {
      at.x = x;
      at.y = y;
      for (const column of at.columns) {
        column.x += x;
        let below = y + at.top;
        for (const row of column.rows) {
          let left = column.x + (column.width - rowWidth(row.map((each) => each.width))) / 2;
          for (const each of row) { place(each, left, below); left += each.width + BESIDE; }
          below += Math.max(...row.map((each) => each.height)) + BELOW;
        }
      }
    };
    const corners = (points) => {
      const shift = ([x, y], [ox, oy]) => { const share = Math.min(CORNER / Math.max(Math.abs(ox - x), Math.abs(oy - y), 1e-9), 0.5); return [x + (ox - x) * share, y + (oy - y) * share]; };
      return points.flatMap((point, index) => (index && index < points.length - 1 ? [shift(point, points[index - 1]), shift(point, points[index + 1])] : [point]));
    };
    const line = (at, index, tail, head, source, reader) => {
      if (tail.column === head.column && head.row - tail.row === 1) {
        const start = [source.x + source.width / 2, source.y + source.height], end = [reader.x + reader.width / 2, reader.y];
        if (Math.abs(start[0] - end[0]) < 0.5) return { points: [start, end], curved: false };
        const knee = [end[0], Math.min(start[1] + BELOW, end[1])], middle = (start[1] + knee[1]) / 2;
        return { points: [start, [start[0], middle], [end[0], middle], knee, knee, end, end], curved: true };
      }
      const leave = source.y + source.height - LEAVE, arrive = reader.y + LEAVE, right = source.x + source.width, left = reader.x, column = at.columns[tail.column];
      if (tail.column === head.column) {
        const lane = column.x + column.width + LANE * (column.lanes.get(index) + 0.5);
        return { points: corners([[right, leave], [lane, leave], [lane, arrive], [reader.x + reader.width, arrive]]), curved: false };
      }
      const shift = (index % 4 - 1.5) * 4, before = at.columns[head.column].x - GUTTER / 2 + shift;
      if (head.column - tail.column === 1) return { points: corners([[right, leave], [before, leave], [before, arrive], [left, arrive]]), curved: false };
      const after = column.x + column.width + room(column) + GUTTER / 2 + shift, above = at.y + at.top - 5;
      return { points: corners([[right, leave], [after, leave], [after, above], [before, above], [before, arrive], [left, arrive]]), curved: false };
    };
    rank(root);
    const whole = tall(root), caps = COLUMNS.map((number) => whole / number + 1);
    search(root, caps, boxes.length < MANY ? TRIES : 2);
    const scales = root.options.map(([width, height]) => Math.min(screen[0] / Math.max(width, 1), screen[1] / Math.max(height, 1), 1));
    settle(root, caps, scales.indexOf(Math.max(...scales)));
    place(root, 0, 0);
    const ways = lines.map(() => null);
    for (const at of [root, ...outer]) {
      for (const [index, tail, head] of at.lines) {
        if (lines[index][2] !== "hidden") ways[index] = line(at, index, tail, head, inner[lines[index][0]], inner[lines[index][1]]);
      }
    }
    const area = (each) => [each.x, each.y, each.width, each.height];
    return { width: root.width, height: root.height, boxes: inner.map(area), frames: outer.map(area), lines: ways };
  };

  const shade = (value, largest) => (value ? Math.max(STEPS - Math.floor(Math.log2(Math.floor(largest / value) || 1)), 1) : 0);
  const prefixed = (n, units, step, low) => {
    let unit = 0;
    while (n >= (unit ? 999.95 : low) && unit < units.length - 1) { n /= step; unit += 1; }
    return unit ? `${n.toFixed(n < 9.995 ? 2 : 1)} ${units[unit]}` : `${n} ${units[unit]}`;
  };
  const bytes = (n) => prefixed(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024, 1024);
  const figure = (heat, value) => {
    if (value === null) return `${heat} unknown`;
    if (heat === "flops") return `flops ${prefixed(value, ["", "K", "M", "G", "T", "P"], 1000, 1000).trim()}`;
    if (heat === "time") return `${value >= 0.9995 ? value.toPrecision(3) + " s" : value * 1e3 >= 0.9995 ? (value * 1e3).toPrecision(3) + " ms" : (value * 1e6).toPrecision(3) + " µs"}`;
    return `${heat === "peak" ? "at peak" : heat} ${bytes(value)}`;
  };
  // Zoom by a factor around a point that stays where it is. A view is x, y, width, height.
  const zoom = ([x, y, w, h], factor, [px, py]) => [px - (px - x) / factor, py - (py - y) / factor, w / factor, h / factor];
  // The view of this aspect (height to width) that shows all of a picture.
  const whole = (width, height, aspect) => {
    const w = Math.max(width + 24, (height + 24) / aspect);
    return [(width - w) / 2, Math.min((height - w * aspect) / 2, -12), w, w * aspect];
  };
  const matches = (parts, words) => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (part) => [part.title, part.path || "", part.head || "", ...part.lines].join(" ").toLowerCase();
    return wanted.length ? parts.flatMap((part, index) => (wanted.every((word) => text(part).includes(word)) ? [index] : [])) : [];
  };
  return { around, visible, edges, arrange, shade, bytes, figure, zoom, whole, matches };
})();
if (typeof module !== "undefined") module.exports = fxmemGraph;
