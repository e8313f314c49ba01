"use strict";

// The data is JSON, compressed and written as text in which no tag can be.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

unpacked(document.getElementById("data").textContent.trim()).then((data) => {
  const byId = (id) => document.getElementById(id);
  const config = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset" };
  const MOST_POINTS = 900; // about what a screen can show; zoomed in, each op is drawn
  const FARTHEST_BUDGET = 3; // in peaks: a line above that would press everything else to the ground
  const LONG_UPDATE = 0.8; // of the step is before it
  const MOST_MODULES = 14;
  const MOST_VALUES = 12;
  const NARROW_LETTER = 6.5; // pixels a letter in the timeline
  const MOST_OUTLINED = 1500; // boxes: more would be all outline

  // Text -------------------------------------------------------------------------------------------------

  const UNITS = [[2 ** 40, "TiB", 2], [2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1], [1, "B", 0]];
  const unitOf = (bytes) => UNITS.find(([size]) => Math.abs(bytes) >= size) || UNITS.at(-1);
  const number = (value, decimals) =>
    value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });

  function bytesText(bytes) {
    const [size, name, decimals] = unitOf(bytes);
    return `${number(bytes / size, decimals)} ${name}`;
  }

  function timeText(nanoseconds) {
    if (nanoseconds >= 1e9) return `${number(nanoseconds / 1e9, 2)} s`;
    return nanoseconds >= 1e6 ? `${number(nanoseconds / 1e6, 1)} ms` : `${number(nanoseconds / 1e3, 0)} µs`;
  }

  const shareText = (part, whole) => (whole ? `${number((100 * part) / whole, 1)} %` : "");
  const moduleText = (word) => data.words[word] || "(outside of any module)";

  // plotly reads tags in its texts; names of the user's are none.
  const inert = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  function shortened(text, most) {
    if (text.length <= most) return text;
    const half = (most - 1) >> 1;
    return `${text.slice(0, half)}…${text.slice(-half)}`;
  }

  // Nothing from the data is ever parsed as HTML.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function swatch(colour) {
    const made = element("span", { class: "swatch" });
    made.style.background = colour;
    return made;
  }

  // Curves -----------------------------------------------------------------------------------------------

  class Curve {
    constructor(found) {
      this.name = found.name;
      this.peak = found.peak;
      this.peakMoment = found.peakMoment;
      this.ops = found.ops;
      this.lives = found.lives;
      this.slices = found.slices;
      this.length = (found.ops.target || []).length;
      this.stack = this.stacked();
      this.total = new Float64Array(this.length);
      for (const held of this.stack) held.forEach((bytes, moment) => (this.total[moment] += bytes));
      this.starts = new Float64Array(this.length + 1);
      for (let i = 0; i < this.length; i++) this.starts[i + 1] = this.starts[i] + this.ops.time[i];
    }

    // Bytes by category at each moment: what begins there less what ended, summed up.
    stacked() {
      const stack = data.categories.map(() => new Float64Array(this.length + 1));
      const { category = [], bytes = [], first = [], stop = [] } = this.lives;
      bytes.forEach((count, life) => {
        stack[category[life]][first[life]] += count;
        stack[category[life]][stop[life]] -= count;
      });
      for (const held of stack) for (let i = 1; i < held.length; i++) held[i] += held[i - 1];
      const workspace = stack[data.categories.indexOf("workspace")];
      for (let i = 0; i < this.length; i++) workspace[i] += this.ops.workspace[i];
      return stack.map((held) => held.subarray(0, this.length));
    }

    label(moment) {
      const module = data.words[this.ops.module[moment]];
      const target = data.words[this.ops.target[moment]];
      return module ? `${module}: ${target}` : target;
    }

    phase(moment) {
      return data.phases[this.ops.phase[moment]];
    }

    // What runs in slices at a moment: "head: 512 in 32 slices", or nothing.
    sliced(moment) {
      const { first = [], stop } = this.slices;
      const found = first.findIndex((start, n) => start <= moment && moment < stop[n]);
      return found < 0 ? "" : this.slicesText(found);
    }

    slicesText(n) {
      const { name, count, of } = this.slices;
      return `${shortened(data.words[name[n]], 32)}: ${number(of[n], 0)} in ${count[n]} slices`;
    }

    // Everything alive at a moment, largest first; the op's workspace is one of them.
    alive(moment) {
      const { name = [], module, category, bytes, first, stop } = this.lives;
      const found = [];
      for (let life = 0; life < name.length; life++) {
        if (first[life] <= moment && moment < stop[life]) {
          found.push({
            name: data.words[name[life]], module: module[life], category: category[life],
            bytes: bytes[life], since: first[life],
          });
        }
      }
      if (this.ops.workspace[moment]) {
        found.push({
          name: "workspace of this op", module: this.ops.module[moment], since: moment,
          category: data.categories.indexOf("workspace"), bytes: this.ops.workspace[moment],
        });
      }
      return found.sort((one, other) => other.bytes - one.bytes);
    }

    modules(moment) {
      const found = new Map();
      for (const value of this.alive(moment)) {
        const group = found.get(value.module) || { module: value.module, bytes: 0, values: [] };
        group.bytes += value.bytes;
        group.values.push(value);
        found.set(value.module, group);
      }
      return [...found.values()].sort((one, other) => other.bytes - one.bytes);
    }
  }

  const curves = data.curves.map((found) => new Curve(found));
  const longest = Math.max(...curves.map((curve) => curve.length));
  const highest = Math.max(...curves.map((curve) => curve.peak));
  const unit = unitOf(highest);
  const present = data.categories.map((_, c) => curves.some((curve) => curve.stack[c].some((bytes) => bytes > 0)));
  const inSlices = curves.some(({ slices: { first = [] } }) => first.length);
  const state = { curve: 1, moment: 0, axis: "op", range: null };

  // Colours ----------------------------------------------------------------------------------------------

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const css = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const colour = (category) => (isDark() ? data.coloursOnDark : data.colours)[category];

  function base(more) {
    const axis = { gridcolor: css("grid"), linecolor: css("line"), zeroline: false, tickcolor: css("line") };
    const layout = {
      paper_bgcolor: css("paper"), plot_bgcolor: css("paper"), showlegend: false, dragmode: dragmode(),
      font: { family: "system-ui, sans-serif", size: 12, color: css("ink") },
      margin: { l: 70, r: 14, t: 12, b: 44 }, hovermode: "x", hoverdistance: -1,
      hoverlabel: { bgcolor: css("panel"), bordercolor: css("line"), font: { color: css("ink") }, align: "left" },
      ...more,
    };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) layout[name] = { ...axis, ...layout[name] };
    }
    return layout;
  }

  // A finger on a figure scrolls the page; the buttons zoom.
  const dragmode = () => (matchMedia("(pointer: coarse)").matches ? false : "zoom");

  // The timeline -----------------------------------------------------------------------------------------

  const scale = () => (state.axis === "time" ? 1e6 : 1); // milliseconds
  const at = (curve, moment) =>
    state.axis === "time" ? curve.starts[moment] / scale() : moment;
  const middle = (curve, moment) => (at(curve, moment) + at(curve, moment + 1)) / 2;
  const end = () => Math.max(...curves.map((curve) => at(curve, curve.length)));

  function momentAt(curve, x) {
    if (state.axis === "op") return Math.floor(x);
    let low = 0;
    let high = curve.length;
    while (low < high) {
      const half = (low + high) >> 1;
      if (curve.starts[half + 1] / scale() <= x) low = half + 1;
      else high = half;
    }
    return low;
  }

  // At most MOST_POINTS stretches of what can be seen; each is drawn as its fullest moment.
  function stretches(curve) {
    const [from, to] = state.range || [0, end()];
    const first = Math.min(Math.max(momentAt(curve, from) - 1, 0), curve.length);
    const stop = Math.max(Math.min(momentAt(curve, to) + 2, curve.length), first);
    const count = Math.min(MOST_POINTS, stop - first);
    const found = [];
    for (let part = 0; part < count; part++) {
      const start = first + Math.floor((part * (stop - first)) / count);
      const after = first + Math.floor(((part + 1) * (stop - first)) / count);
      let fullest = start;
      for (let i = start; i < after; i++) if (curve.total[i] > curve.total[fullest]) fullest = i;
      found.push({ start, after, fullest });
    }
    return found;
  }

  function areas(curve, parts, axes) {
    const xs = parts.flatMap(({ start, after }) => [at(curve, start), at(curve, after)]);
    const floor = new Float64Array(parts.length);
    const traces = [];
    data.categories.forEach((name, category) => {
      if (!present[category]) return;
      parts.forEach(({ fullest }, part) => (floor[part] += curve.stack[category][fullest]));
      const ys = parts.flatMap((_, part) => [floor[part] / unit[0], floor[part] / unit[0]]);
      traces.push({
        ...axes, x: xs, y: ys, name, mode: "lines", line: { width: 0 }, hoverinfo: "skip",
        fill: traces.length ? "tonexty" : "tozeroy", fillcolor: colour(category),
      });
    });
    return traces;
  }

  function hoverText(curve, moment) {
    const lines = [
      `<b>${bytesText(curve.total[moment])}</b> held at op ${number(moment, 0)}`,
      inert(shortened(curve.label(moment), 60)),
      ...(curve.sliced(moment) ? [inert(curve.sliced(moment))] : []),
      curve.phase(moment) + (data.timed ? `, ${timeText(curve.ops.time[moment])}` : ""),
    ];
    return lines.join("<br>");
  }

  function outline(curve, parts, axes) {
    return {
      ...axes, mode: "lines", line: { width: 0 }, name: curve.name,
      x: parts.map(({ fullest }) => middle(curve, fullest)),
      y: parts.map(({ fullest }) => curve.total[fullest] / unit[0]),
      customdata: parts.map(({ fullest }) => fullest),
      text: parts.map(({ fullest }) => hoverText(curve, fullest)),
      hovertemplate: "%{text}<extra></extra>",
    };
  }

  // The phases as boxes in a row above the curve, no finer than the curve is drawn.
  function phases(curve, parts, axes) {
    const boxes = data.phases.map(() => ({ x: [], y: [] }));
    for (let part = 0; part < parts.length; ) {
      const phase = curve.ops.phase[parts[part].start];
      let next = part + 1;
      while (next < parts.length && curve.ops.phase[parts[next].start] === phase) next++;
      const [from, to] = [at(curve, parts[part].start), at(curve, parts[next - 1].after)];
      boxes[phase].x.push(from, from, to, to, from, null);
      boxes[phase].y.push(0, 1, 1, 0, 0, null);
      part = next;
    }
    return boxes.map((box, phase) => ({
      ...axes, ...box, mode: "none", fill: "toself", hoverinfo: "skip",
      fillcolor: css(data.phases[phase]), name: data.phases[phase],
    }));
  }

  const PANELS = [
    { curve: { xaxis: "x", yaxis: "y" }, strip: { xaxis: "x", yaxis: "y3" }, title: 1.0 },
    { curve: { xaxis: "x2", yaxis: "y2" }, strip: { xaxis: "x2", yaxis: "y4" }, title: 0.475 },
  ];

  function timelineFigure() {
    const traces = curves.flatMap((curve, panel) => {
      const parts = stretches(curve);
      return [
        ...areas(curve, parts, PANELS[panel].curve),
        outline(curve, parts, PANELS[panel].curve),
        ...phases(curve, parts, PANELS[panel].strip),
      ];
    });
    const top = (1.2 * Math.max(highest, budgetShown() ? data.budget : 0)) / unit[0];
    const range = state.range || [0, end()];
    const held = { title: { text: `held (${unit[1]})` }, range: [0, top], fixedrange: true };
    const strip = { range: [0, 1], fixedrange: true, visible: false };
    const layout = base({
      margin: { l: 70, r: 14, t: 26, b: 44 },
      xaxis: { range, anchor: "y", matches: "x2", showticklabels: false },
      xaxis2: {
        range, anchor: "y2",
        title: { text: state.axis === "time" ? "predicted time (ms)" : "op number" },
      },
      yaxis: { ...held, domain: [0.55, 0.965] },
      yaxis3: { ...strip, domain: [0.97, 0.995] },
      yaxis2: { ...held, domain: [0, 0.415] },
      yaxis4: { ...strip, domain: [0.42, 0.445] },
      shapes: [...bands(), ...shapes()],
      annotations: annotations(top),
    });
    return { traces, layout };
  }

  // Behind the curve, where something runs in slices: a band from bottom to top, told apart from its neighbours.
  function bands() {
    return curves.flatMap((curve, panel) => {
      const axis = panel ? "2" : "";
      const { first = [], stop } = curve.slices;
      return first.map((start, n) => ({
        type: "rect", layer: "below", xref: `x${axis}`, yref: `y${axis} domain`, y0: 0, y1: 1,
        x0: at(curve, start), x1: at(curve, stop[n]), fillcolor: css("slices"), line: { color: css("line"), width: 1 },
      }));
    });
  }

  // The names of those bands that are wide enough for them.
  function bandNames(label) {
    const [from, to] = state.range || [0, end()];
    return curves.flatMap((curve, panel) => {
      const axis = panel ? "2" : "";
      const { first = [], stop } = curve.slices;
      return first.flatMap((start, n) => {
        const [left, right] = [Math.max(at(curve, start), from), Math.min(at(curve, stop[n]), to)];
        const text = curve.slicesText(n);
        if ((right - left) / (to - from) < (text.length * NARROW_LETTER) / byId("timeline").clientWidth) return [];
        return [{
          ...label, bgcolor: undefined, xref: `x${axis}`, yref: `y${axis} domain`, x: (left + right) / 2, y: 1,
          yanchor: "top", text: inert(text),
        }];
      });
    });
  }

  const budgetShown = () => data.budget !== null && data.budget <= FARTHEST_BUDGET * highest;

  function shapes() {
    const line = { type: "line", x0: 0, x1: 1, line: { color: css("ink"), width: 1.2, dash: "dash" } };
    const bytes = data.budget / unit[0];
    return budgetShown()
      ? ["", "2"].map((axis) => ({ ...line, xref: `x${axis} domain`, yref: `y${axis}`, y0: bytes, y1: bytes }))
      : [];
  }

  function annotations() {
    const label = { showarrow: false, bgcolor: css("paper"), opacity: 0.92, font: { size: 11, color: css("ink") } };
    const found = bandNames(label);
    curves.forEach((curve, panel) => {
      const axis = panel ? "2" : "";
      found.push({
        xref: "paper", yref: "paper", x: 0, y: PANELS[panel].title, xanchor: "left", yanchor: "bottom",
        text: `<b>${inert(curve.name)}</b>`, showarrow: false, font: { size: 13, color: css("ink") },
      });
      const peak = curve.peakMoment ?? 0;
      const left = middle(curve, peak) < end() / 2;
      found.push({
        ...label, xref: `x${axis}`, yref: `y${axis}`, x: middle(curve, peak), y: curve.peak / unit[0],
        text: `peak ${bytesText(curve.peak)}`, showarrow: true, arrowhead: 2, arrowsize: 1, arrowwidth: 1,
        arrowcolor: css("ink"), ax: left ? 34 : -34, ay: budgetNear(curve) ? -40 : -20, xanchor: left ? "left" : "right",
      });
      if (budgetShown() && panel === 1) {
        found.push({
          ...label, xref: `x${axis} domain`, yref: `y${axis}`, x: left ? 1 : 0, y: data.budget / unit[0],
          xanchor: left ? "right" : "left", yanchor: "bottom", text: `budget ${bytesText(data.budget)}`,
        });
      }
    });
    return found;
  }

  // Whether the budget's label would lie on the peak's.
  const budgetNear = (curve) => budgetShown() && data.budget >= curve.peak && data.budget < 1.15 * curve.peak;

  function drawTimeline() {
    const { traces, layout } = timelineFigure();
    return Plotly.react("timeline", traces, layout, config);
  }

  // All of the step, but for a long update of the parameters after everything of interest.
  function usual() {
    const last = Math.max(...curves.map((curve) => at(curve, updateOf(curve))));
    const peaks = curves.map((curve) => middle(curve, curve.peakMoment ?? 0));
    return last > 0 && last < LONG_UPDATE * end() && Math.max(...peaks) < last ? [0, 1.05 * last] : null;
  }

  function updateOf(curve) {
    const update = data.phases.indexOf("optimizer");
    const found = curve.ops.phase.indexOf(update);
    return found < 0 ? curve.length : found;
  }

  function zoomTo(range) {
    const whole = end();
    state.range = range && [Math.max(range[0], 0), Math.min(range[1], whole)];
    if (state.range && state.range[1] - state.range[0] >= whole) state.range = null;
    return drawTimeline();
  }

  function zoomBy(factor) {
    const [from, to] = state.range || [0, end()];
    const here = middle(curves[state.curve], state.moment);
    const half = Math.max(((to - from) * factor) / 2, (4 * end()) / longest);
    zoomTo([here - half, here + half]);
  }

  // The chosen moment ------------------------------------------------------------------------------------

  function choose(curve, moment) {
    state.curve = curve;
    state.moment = Math.max(0, Math.min(moment, curves[curve].length - 1));
    const here = middle(curves[curve], state.moment);
    if (state.range && (here < state.range[0] || here > state.range[1])) {
      const half = (state.range[1] - state.range[0]) / 2;
      zoomTo([here - half, here + half]);
    }
    placeCursors();
    showMoment();
  }

  // Lines beside plotly's own drawing, which would be drawn anew for each step of the keys.
  function placeCursors() {
    const axis = state.curve ? "2" : "";
    const here = middle(curves[state.curve], state.moment);
    placeCursor("timeline", `xaxis${axis}`, `yaxis${axis}`, here);
    if (placed.bytes.length) placeCursor("arena", "xaxis", "yaxis", state.curve === 1 ? state.moment + 0.5 : NaN);
  }

  function placeCursor(figure, xaxis, yaxis, here) {
    const { [xaxis]: across, [yaxis]: up } = byId(figure)._fullLayout;
    const left = across.d2p(here);
    const cursor = byId(`${figure}-cursor`);
    cursor.hidden = !(left >= 0 && left <= across._length);
    cursor.style.left = `${across._offset + left}px`;
    cursor.style.top = `${up._offset}px`;
    cursor.style.height = `${up._length}px`;
  }

  function showMoment() {
    const curve = curves[state.curve];
    for (const button of document.querySelectorAll("[data-curve]")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.curve) === state.curve));
    }
    if (!curve.length) return;
    const total = curve.total[state.moment];
    const said =
      `${curve.name}, op ${number(state.moment, 0)} of ${number(curve.length, 0)}: ` +
      `${bytesText(total)} held in the ${curve.phase(state.moment)} at ${curve.label(state.moment)}` +
      (curve.sliced(state.moment) && ` (${curve.sliced(state.moment)})`);
    byId("moment-title").textContent = said;
    const slider = byId("timeline");
    slider.setAttribute("aria-valuemax", String(curve.length - 1));
    slider.setAttribute("aria-valuenow", String(state.moment));
    slider.setAttribute("aria-valuetext", said);
    showCategories(curve, total);
    showModules(curve.modules(state.moment), total);
  }

  function showCategories(curve, total) {
    const bar = [];
    const rows = [];
    data.categories.forEach((name, category) => {
      const bytes = curve.stack[category][state.moment];
      if (!bytes) return;
      const part = element("span");
      part.style.cssText = `width: ${(100 * bytes) / total}%; background: ${colour(category)}`;
      bar.push(part);
      rows.push(element("li", {}, element("span", {}, swatch(colour(category)), name), ...amount(bytes, total)));
    });
    byId("moment-bar").replaceChildren(...bar);
    byId("moment-categories").replaceChildren(...rows);
  }

  function showModules(groups, total) {
    const rows = groups.slice(0, MOST_MODULES).map((group) => moduleRow(group, total));
    const rest = groups.slice(MOST_MODULES);
    if (rest.length) {
      const bytes = rest.reduce((sum, group) => sum + group.bytes, 0);
      const name = rest.length === 1 ? "one more module" : `${rest.length} more modules`;
      rows.push(unfolding(name, bytes, total, () => rest.map((group) => moduleRow(group, total))));
    }
    byId("moment-modules").replaceChildren(...rows);
  }

  const moduleRow = (group, total) =>
    unfolding(moduleText(group.module), group.bytes, total, () => [valueList(group.values)]);

  const amount = (bytes, total) =>
    [bytesText(bytes), shareText(bytes, total)].map((text) => element("span", { class: "amount" }, text));

  // A row that shows what it is made of when it is opened.
  function unfolding(name, bytes, total, inside) {
    const share = element("span", { class: "share" });
    share.style.width = `${(100 * bytes) / total}%`;
    const row = element(
      "details",
      { "data-bytes": bytes },
      element("summary", {}, share, element("span", {}, name), ...amount(bytes, total)),
    );
    row.addEventListener("toggle", () => row.children.length < 2 && row.append(...inside()), { once: true });
    return row;
  }

  function valueList(values) {
    const rows = values.slice(0, MOST_VALUES).map((value) => {
      const name = element("span", {}, swatch(colour(value.category)), shortened(value.name, 48));
      name.title = `${value.name}: ${data.categories[value.category]}, since op ${value.since}`;
      return element("li", {}, name, element("span", { class: "amount" }, bytesText(value.bytes)));
    });
    const rest = values.slice(MOST_VALUES);
    if (rest.length) {
      const bytes = rest.reduce((sum, value) => sum + value.bytes, 0);
      const more = element("span", {}, `${rest.length} more`);
      rows.push(element("li", {}, more, element("span", { class: "amount" }, bytesText(bytes))));
    }
    return element("ul", { class: "values" }, ...rows);
  }

  // All boxes of a colour as one path, however many there are.
  function painted(boxes, fillcolor) {
    const path = boxes
      .filter(([left, right, low, high]) => left < right && low < high)
      .map(([left, right, low, high]) => `M${left},${low}V${high}H${right}V${low}Z`);
    const width = path.length > MOST_OUTLINED ? 0 : 0.6;
    return { type: "path", path: path.join("") || "M0,0Z", fillcolor, line: { width, color: css("paper") }, layer: "between" };
  }

  function hide(...parts) {
    for (const part of parts) byId(part).hidden = true;
    return null;
  }

  // The other figures ------------------------------------------------------------------------------------

  function drawStrip() {
    const { name = [], kept = [], recomputed = [], again = [], time = [] } = data.strip;
    if (!name.length) return hide("strip");
    const most = unitOf(Math.max(...kept, ...recomputed));
    const texts = name.map((text, layer) => {
      const runs = again[layer] ? `runs again: ${again[layer]}×` : "runs once";
      const spent = data.timed && time[layer] ? `, ${timeText(time[layer])}` : "";
      return (
        `<b>${inert(shortened(text, 60))}</b><br>kept ${bytesText(kept[layer])}, ` +
        `recomputed ${bytesText(recomputed[layer])}<br>${runs}${spent}`
      );
    });
    const both = kept.map((bytes, layer) => bytes + recomputed[layer]);
    const boxes = (lows, highs, fill) => painted(
      lows.map((low, layer) => [layer, layer + 1, low / most[0], highs[layer] / most[0]]), fill);
    const traces = [
      {
        x: name.map((_, layer) => layer + 0.5), y: both.map((bytes) => bytes / most[0]), mode: "lines",
        line: { width: 0 }, text: texts, hovertemplate: "%{text}<extra></extra>",
      },
    ];
    const layout = base({
      xaxis: { title: { text: "layer, in the order of the forward" }, range: [0, name.length] },
      yaxis: { title: { text: most[1] }, fixedrange: true, range: [0, (1.05 * Math.max(...both)) / most[0]] },
      shapes: [boxes(kept.map(() => 0), kept, css("kept")), boxes(kept, both, css("recomputed"))],
    });
    byId("strip-legend").replaceChildren(
      element("span", {}, swatch(css("kept")), "kept"),
      element("span", {}, swatch(css("recomputed")), "recomputed"),
    );
    return Plotly.react("strip", traces, layout, config);
  }

  function drawFrontier() {
    const found = data.frontier;
    if (!found) return hide("frontier");
    const timed = found.time > 0;
    const cost = (point) => (timed ? (100 * point.time) / found.time : point.again);
    const text = (point) =>
      `<b>${bytesText(point.peak)}</b><br>${timed ? `+${number(cost(point), 1)} % time, ` : ""}` +
      `${number(point.again, 0)} ops run again<br>${point.status}`;
    const trace = (points, style) => ({
      x: points.map(cost), y: points.map((point) => point.peak / unit[0]), text: points.map(text),
      hovertemplate: "%{text}<extra></extra>", ...style,
    });
    const traces = [
      trace(found.points, {
        mode: "lines+markers", line: { color: css("accent"), width: 2 }, marker: { size: 8 }, name: "frontier",
      }),
      trace([found.chosen], {
        mode: "markers", name: "this plan",
        marker: { symbol: "star", size: 17, color: css("recomputed"), line: { width: 1, color: css("ink") } },
      }),
    ];
    const line = (bytes, name, place) => ({
      shape: {
        type: "line", xref: "paper", x0: 0, x1: 1, y0: bytes / unit[0], y1: bytes / unit[0],
        line: { color: css("faint"), width: 1.2, dash: "dash" },
      },
      note: {
        xref: "paper", y: bytes / unit[0], showarrow: false, ...place,
        text: `${name} ${bytesText(bytes)}`, font: { size: 11, color: css("faint") },
      },
    });
    const lines = [line(found.lowerBound, "lower bound", { x: 0, xanchor: "left", yanchor: "top" })];
    if (budgetShown()) lines.push(line(data.budget, "budget", { x: 1, xanchor: "right", yanchor: "bottom" }));
    const layout = base({
      hovermode: "closest", hoverdistance: 30,
      xaxis: { title: { text: timed ? "extra time (% of the step)" : "ops that run again" }, rangemode: "tozero" },
      yaxis: { title: { text: `peak (${unit[1]})` }, rangemode: "tozero" },
      shapes: lines.map(({ shape }) => shape),
      annotations: [
        ...lines.map(({ note }) => note),
        {
          x: cost(found.chosen), y: found.chosen.peak / unit[0], text: "this plan", ax: 26, ay: -42, arrowhead: 0,
          arrowwidth: 1, arrowcolor: css("faint"), standoff: 9, bgcolor: css("paper"),
        },
      ],
    });
    return Plotly.react("frontier", traces, layout, config);
  }

  function drawMeasured() {
    byId("measured-part").hidden = !data.measured.length;
    if (!data.measured.length) return null;
    const hues = [css("faint"), css("accent")];
    const traces = data.measured.map((found, place) => ({
      x: found.at.map((event) => (100 * event) / found.events), y: found.bytes.map((bytes) => bytes / unit[0]),
      mode: "lines", line: { color: hues[place], width: 1.5, shape: "hv" }, name: found.name,
      hovertemplate: `${inert(found.name)}: %{y:,.1f} ${unit[1]}<extra></extra>`,
    }));
    const layout = base({
      showlegend: true, legend: { orientation: "h", y: 1.15, x: 0 },
      xaxis: { title: { text: "allocations and frees (% of the step)" }, range: [0, 100] },
      yaxis: { title: { text: `held (${unit[1]})` }, rangemode: "tozero" },
      shapes: data.measured.map(({ predicted }, place) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: predicted / unit[0], y1: predicted / unit[0],
        line: { color: hues[place], width: 1, dash: "dot" },
      })),
    });
    return Plotly.react("measured", traces, layout, config);
  }

  // The arena --------------------------------------------------------------------------------------------

  // Each spot is a life of the plan, and its place: what is written over it later may end it sooner.
  function spots() {
    const { life = [], offset = [], bytes = [], stop = [] } = data.arena ? data.arena.spots : {};
    const of = (column) => life.map((number) => curves[1].lives[column][number]);
    return { name: of("name"), module: of("module"), category: of("category"), first: of("first"), offset, bytes, stop };
  }

  const placed = spots();

  function drawArena() {
    if (!placed.bytes.length) return hide("arena", "arena-readout");
    const { category, offset, bytes, first, stop } = placed;
    const size = unitOf(data.arena.bytes);
    const boxes = data.categories.map(() => []);
    bytes.forEach((count, spot) => boxes[category[spot]].push(
      [first[spot], stop[spot], offset[spot] / size[0], (offset[spot] + count) / size[0]]));
    const bound = data.arena.lowerBound / size[0];
    const line = { type: "line", line: { color: css("ink"), width: 1.2, dash: "dash" } };
    const layout = base({
      hovermode: false,
      xaxis: { title: { text: "op number" }, range: [0, curves[1].length] },
      yaxis: { title: { text: `offset (${size[1]})` }, range: [0, (1.02 * data.arena.bytes) / size[0]] },
      shapes: [
        { ...line, xref: "paper", x0: 0, x1: 1, y0: bound, y1: bound },
        ...boxes.flatMap((found, place) => (found.length ? [painted(found, colour(place))] : [])),
      ],
    });
    return Plotly.react("arena", [{ x: [], y: [] }], layout, config);
  }

  // Which value is under the pointer; null for free memory, undefined outside of the axes.
  function spotAt(event) {
    const figure = byId("arena");
    const { xaxis, yaxis } = figure._fullLayout;
    const box = figure.getBoundingClientRect();
    const moment = Math.floor(xaxis.p2d(event.clientX - box.left - xaxis._offset));
    const place = yaxis.p2d(event.clientY - box.top - yaxis._offset) * unitOf(data.arena.bytes)[0];
    if (moment < 0 || moment >= curves[1].length || place < 0 || place > data.arena.bytes) return undefined;
    const { offset, bytes, first, stop } = placed;
    const spot = bytes.findIndex(
      (count, i) => first[i] <= moment && moment < stop[i] && offset[i] <= place && place < offset[i] + count,
    );
    return { moment, spot };
  }

  function listenToArena() {
    byId("arena").on("plotly_afterplot", placeCursors);
    const readout = byId("arena-readout");
    byId("arena").addEventListener("pointermove", (event) => {
      const found = spotAt(event);
      readout.textContent = found === undefined ? " " : spotText(found);
    });
    byId("arena").addEventListener("click", (event) => {
      const found = spotAt(event);
      if (found !== undefined) choose(1, found.moment);
    });
  }

  function spotText({ moment, spot }) {
    if (spot < 0) return `op ${number(moment, 0)}: free`;
    const { name, module, category, offset, bytes, first, stop } = placed;
    return (
      `op ${number(moment, 0)}: ${data.words[name[spot]]} of ${moduleText(module[spot])}, ` +
      `${data.categories[category[spot]]}, ${bytesText(bytes[spot])} at ${bytesText(offset[spot])}, ` +
      `ops ${number(first[spot], 0)} to ${number(stop[spot] - 1, 0)}`
    );
  }

  // Controls ---------------------------------------------------------------------------------------------

  function toPeak() {
    choose(state.curve, curves[state.curve].peakMoment ?? 0);
  }

  const ACTIONS = {
    previous: () => choose(state.curve, state.moment - 1),
    next: () => choose(state.curve, state.moment + 1),
    peak: toPeak,
    in: () => zoomBy(0.5),
    out: () => zoomBy(2),
    all: () => zoomTo(null),
  };

  const KEYS = {
    ArrowLeft: (far) => choose(state.curve, state.moment - far),
    ArrowRight: (far) => choose(state.curve, state.moment + far),
    ArrowUp: () => choose(0, state.moment),
    ArrowDown: () => choose(1, state.moment),
    Home: () => choose(state.curve, 0),
    End: () => choose(state.curve, curves[state.curve].length - 1),
    Enter: toPeak,
    p: toPeak,
    "+": ACTIONS.in,
    "=": ACTIONS.in,
    "-": ACTIONS.out,
    0: ACTIONS.all,
  };

  function setAxis(axis) {
    state.axis = axis;
    state.range = usual();
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
      button.disabled = button.dataset.axis === "time" && !data.timed;
      if (button.disabled) button.title = "No op was timed";
    }
  }

  function listen() {
    const timeline = byId("timeline");
    timeline.on("plotly_afterplot", placeCursors);
    placeCursors();
    timeline.on("plotly_click", ({ points }) => {
      const point = points.find(({ customdata }) => customdata !== undefined);
      if (point) choose(point.data.yaxis === "y2" ? 1 : 0, point.customdata);
    });
    timeline.on("plotly_relayout", (change) => {
      const [from, to] = [change["xaxis.range[0]"] ?? change["xaxis2.range[0]"],
        change["xaxis.range[1]"] ?? change["xaxis2.range[1]"]];
      if (from !== undefined) zoomTo([from, to]);
      else if (change["xaxis.autorange"] || change["xaxis2.autorange"]) zoomTo(null);
    });
    timeline.addEventListener("keydown", (event) => {
      const action = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
      if (!action) return;
      event.preventDefault();
      action(event.shiftKey ? 10 : 1);
    });
    document.querySelectorAll("[data-do]").forEach((button) =>
      button.addEventListener("click", () => ACTIONS[button.dataset.do]()));
    document.querySelectorAll("[data-curve]").forEach((button) =>
      button.addEventListener("click", () => choose(Number(button.dataset.curve), state.moment)));
    document.querySelectorAll("[data-axis]").forEach((button) =>
      button.addEventListener("click", () => { setAxis(button.dataset.axis); drawTimeline(); }));
    byId("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; redraw(); });
    prefersDark.addEventListener("change", redraw);
    if (placed.bytes.length) listenToArena();
  }

  function drawLegend() {
    const categories = data.categories.flatMap((name, category) =>
      present[category] ? [element("span", {}, swatch(colour(category)), name)] : []);
    const seen = new Set(curves.flatMap((curve) => [...new Set(curve.ops.phase)]));
    const phases = data.phases.flatMap((name, phase) =>
      seen.has(phase) ? [element("span", {}, swatch(css(name)), name)] : []);
    const slices = inSlices
      ? [element("div", {}, "behind: ", element("span", {}, swatch(css("slices")), "runs in slices"))] : [];
    byId("legend").replaceChildren(
      element("div", {}, "held: ", ...categories), element("div", {}, "bar above: ", ...phases), ...slices);
  }

  function draw() {
    const dark = isDark();
    byId("theme").textContent = dark ? "Light" : "Dark";
    byId("theme").setAttribute("aria-pressed", String(dark));
    drawLegend();
    showMoment();
    return drawTimeline();
  }

  // What is further down the page can wait until the timeline is seen.
  function drawTheRest() {
    return Promise.all([drawStrip(), drawFrontier(), drawMeasured(), drawArena()]);
  }

  function redraw() {
    return draw().then(drawTheRest);
  }

  setAxis(inSlices && data.timed ? "time" : "op"); // many ops in place of one say little of how long they take
  state.moment = curves[state.curve].peakMoment ?? 0;
  draw()
    .then(() => new Promise((seen) => requestAnimationFrame(() => setTimeout(seen))))
    .then(() => { window.lowtideOpen = performance.now(); })
    .then(drawTheRest)
    .then(() => {
      listen();
      window.lowtide = { curves, state, choose }; // what the page shows, for whoever wants to look closer
      window.lowtideReady = performance.now();
    });
});
