"use strict";
// Draws charts. A chart has series, a series has marks: [x, y, low, high, what is said of it].
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLORS = ["#3b82c4", "#c8722c", "#3d9a63", "#b04a8b", "#8b7a2e", "#6f6fc9", "#2d9ca6", "#c4504a", "#7a8590"];
  const WIDEST_LABEL = 300;

  function draw(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // A value in few digits; `gap` is the distance to the next one on an axis, from which it must differ.
  function label(value, gap = Infinity) {
    const size = Math.abs(value);
    if (!size) return "0";
    const digits = Math.floor(Math.log10(size)) - Math.floor(Math.log10(gap)) + 1;
    const short = Number(value.toPrecision(Math.min(15, Math.max(3, digits))));
    return size < 0.001 || size >= 1e5 ? short.toExponential() : String(short);
  }

  function labels(values) {
    const gap = values.length > 1 ? values[1] - values[0] : Infinity;
    return values.map((value) => label(value, gap));
  }

  // What an axis shows of values: all of them, and more where they are all but one.
  function range(values) {
    const [least, greatest] = [Math.min(...values), Math.max(...values)];
    const size = Math.max(Math.abs(least), Math.abs(greatest));
    if (greatest - least > 1e-9 * size) return [least, greatest];
    const more = size / 10 || 1;
    return [least - more, greatest + more];
  }

  // Values for an axis, at least two and at most about `most`.
  function ticks(least, greatest, most, log) {
    if (log) {
      for (const parts of [[1, 2, 5], [1, 3], [1]]) {
        const found = [];
        for (let power = Math.floor(Math.log10(least)); power <= Math.log10(greatest); power++) {
          for (const part of parts) {
            const value = part * 10 ** power;
            if (value >= least * 0.999 && value <= greatest * 1.001) found.push(value);
          }
        }
        const apart = parts.length > 1 ? 1 : Math.ceil(found.length / most); // of many powers some
        if (found.length > 1 && found.length <= most * apart) return found.filter((_, i) => i % apart === 0);
      }
    }
    const rough = (greatest - least) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((part) => power * part >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(least / step - 1e-6); i * step <= greatest + step * 1e-6; i++) found.push(i * step);
    return found;
  }

  function scale(least, greatest, from, to, log) {
    const at = log ? Math.log : (value) => value;
    const span = at(greatest) - at(least);
    return (value) => from + ((at(value) - at(least)) / span) * (to - from);
  }

  function number(value) {
    return typeof value === "number";
  }

  class Chart {
    constructor(host, chart) {
      this.host = host;
      this.chart = chart;
      this.told = host.nextElementSibling;
      this.shown = chart.series.map(() => true);
      this.legend(this.told.nextElementSibling);
      // It stays while what it shows is drawn anew, and keeps the focus.
      this.svg = draw(host, "svg", { role: "application", tabindex: 0, "aria-label": chart.title });
      this.svg.setAttribute("aria-description", "Arrow keys read the figures; the table below has all of them.");
      this.places = []; // of marks in sight: x, y, number of the series, mark, from a figure to its place
      this.chosen = -1; // place of the mark that is told of
      host.addEventListener("pointermove", (event) => this.point(event));
      host.addEventListener("pointerleave", () => this.tell(-1));
      host.addEventListener("keydown", (event) => this.key(event));
      this.draw();
      const resized = () => Math.floor(host.clientWidth) !== this.width && this.draw();
      new ResizeObserver(resized).observe(host);
    }

    color(i) {
      return COLORS[i % COLORS.length];
    }

    legend(list) {
      if (this.chart.series.length < 2) return;
      this.chart.series.forEach((series, i) => {
        const box = document.createElement("input");
        box.type = "checkbox";
        box.checked = true;
        box.addEventListener("change", () => {
          this.shown[i] = box.checked;
          this.draw();
        });
        const sample = document.createElementNS(SVG, "svg");
        sample.setAttribute("viewBox", "0 0 24 14");
        sample.setAttribute("aria-hidden", "true");
        const dashes = series.dashed ? "4 3" : "none";
        draw(sample, "path", { d: "M0 7H24", stroke: this.color(i), "stroke-width": 2, "stroke-dasharray": dashes });
        const entry = document.createElement("label");
        entry.append(box, sample, series.name);
        const item = document.createElement("li");
        item.append(entry);
        list.append(item);
      });
    }

    draw() {
      const width = Math.floor(this.host.clientWidth);
      const told = this.chosen < 0 ? null : this.places[this.chosen][3];
      this.width = width;
      this.places = [];
      this.svg.replaceChildren();
      const inside = draw(this.svg, "g", { "aria-hidden": "true" }); // the table says it better
      this.pointer = draw(this.svg, "g", {});
      const height = !width ? 0 : this.chart.kind === "bars" ? this.bars(inside, width) : this.lines(inside, width);
      this.svg.setAttribute("viewBox", "0 0 " + width + " " + height);
      this.tell(this.places.findIndex((place) => place[3] === told));
    }

    lines(svg, width) {
      const { series, log } = this.chart;
      const height = Math.round(Math.max(260, Math.min(440, width * 0.5)));
      draw(svg, "text", { class: "shown", x: 0, y: 14 }, this.chart.y);
      const marks = series.flatMap((one) => one.marks);
      if (!marks.length) return height;
      const xs = [...new Set(marks.map((mark) => mark[0]))].sort((a, b) => a - b);
      const ys = marks.flatMap((mark) => mark.slice(1, 4)).filter(number);
      const marked = ticks(...range(ys), 6, false);
      const said = labels(marked);
      const left = Math.max(52, 7.4 * Math.max(...said.map((text) => text.length)) + 12);
      const [right, top, bottom] = [width - 14, 28, height - 46];
      const ratio = log && xs[0] > 0;
      const [first, last] = range(xs);
      const x = scale(first, last, left + 10, right - 10, ratio);
      const y = scale(...range([...ys, ...marked]), bottom - 6, top + 6, false);
      marked.forEach((value, i) => {
        draw(svg, "path", { class: "grid", d: "M" + left + " " + y(value) + "H" + right });
        draw(svg, "text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, said[i]);
      });
      const room = Math.max(2, Math.floor((right - left) / 56));
      const powers = xs.every((value) => Number.isInteger(value)) && xs.length <= room;
      const places = powers ? xs : ticks(first, last, room, ratio);
      const names = powers ? xs.map((value) => label(value, 1)) : labels(places);
      places.forEach((value, i) => {
        draw(svg, "path", { class: "grid", d: "M" + x(value) + " " + top + "V" + bottom });
        draw(svg, "text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, names[i]);
      });
      draw(svg, "text", { class: "shown", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, this.chart.x);
      series.forEach((one, i) => {
        if (this.shown[i]) this.line(svg, one, i, x, y);
      });
      return height;
    }

    line(svg, one, i, x, y) {
      const color = this.color(i);
      const band = one.marks.filter((mark) => number(mark[2]) && number(mark[3]));
      if (band.length > 1) {
        const upper = band.map((mark) => x(mark[0]) + " " + y(mark[3]));
        const lower = band.map((mark) => x(mark[0]) + " " + y(mark[2])).reverse();
        draw(svg, "path", { class: "band", fill: color, d: "M" + [...upper, ...lower].join("L") + "Z" });
      }
      const path = one.marks.map((mark, at) => {
        const to = x(mark[0]) + " " + y(mark[1]);
        return at && one.step ? "H" + x(mark[0]) + "V" + y(mark[1]) : (at ? "L" : "M") + to;
      });
      const dashes = one.dashed ? "5 4" : "none";
      draw(svg, "path", { class: "line", stroke: color, "stroke-dasharray": dashes, d: path.join("") });
      for (const mark of one.marks) {
        draw(svg, "circle", { cx: x(mark[0]), cy: y(mark[1]), r: 3.5, fill: color });
        this.places.push([x(mark[0]), y(mark[1]), i, mark, (value) => [x(mark[0]), y(value)]]);
      }
    }

    bars(svg, width) {
      const { series, log, base } = this.chart;
      const entries = [];
      series.forEach((one, i) => {
        if (this.shown[i]) for (const mark of one.marks) entries.push([i, mark]);
      });
      const narrow = width < 620;
      const longest = Math.max(0, ...entries.map(([, mark]) => mark[0].length));
      const left = narrow ? 0 : Math.min(WIDEST_LABEL, width * 0.45, 7.4 * longest + 12);
      const each = narrow ? 42 : 26;
      const height = entries.length * each + 44;
      const right = width - 64;
      const values = entries.flatMap(([, mark]) => mark.slice(1, 4)).filter(number).concat(base);
      const [least, greatest] = range(values);
      const ratio = log && least > 0;
      const x = scale(least, greatest, left, right, ratio);
      const marked = ticks(least, greatest, narrow ? 4 : 7, ratio);
      const names = labels(marked);
      marked.forEach((value, i) => {
        draw(svg, "path", { class: "grid", d: "M" + x(value) + " 0V" + (height - 40) });
        draw(svg, "text", { x: x(value), y: height - 24, "text-anchor": "middle" }, names[i]);
      });
      draw(svg, "text", { class: "shown", x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, this.chart.y);
      entries.forEach(([i, mark], at) => this.bar(svg, i, mark, at * each, each, left, narrow, x));
      const zero = x(base);
      draw(svg, "path", { stroke: "currentcolor", d: "M" + zero + " 0V" + (height - 40) });
      return height;
    }

    bar(svg, i, mark, top, each, left, narrow, x) {
      const [name, value, low, high] = mark;
      const middle = top + (narrow ? 30 : each / 2);
      const room = Math.floor((narrow ? this.host.clientWidth : left - 12) / 7.2);
      const text = name.length > room ? name.slice(0, room - 1) + "…" : name;
      if (narrow) draw(svg, "text", { class: "shown", x: 0, y: top + 16 }, text);
      else draw(svg, "text", { class: "shown", x: left - 10, y: middle + 4, "text-anchor": "end" }, text);
      const [from, to] = [x(this.chart.base), x(value)];
      const size = { x: Math.min(from, to), y: middle - 6, width: Math.max(1, Math.abs(to - from)), height: 12 };
      draw(svg, "rect", { ...size, fill: this.color(i), opacity: 0.85 });
      if (number(low) && number(high)) {
        draw(svg, "path", { stroke: "currentcolor", d: "M" + x(low) + " " + middle + "H" + x(high) });
      }
      const end = Math.max(to, number(high) ? x(high) : to, from);
      draw(svg, "text", { x: end + 6, y: middle + 4 }, label(value));
      this.places.push([to, middle, i, mark, (other) => [x(other), middle]]);
    }

    // Say what a mark is, by its number among those in sight; -1: nothing. Only what keys ask for is read out.
    tell(which, aloud) {
      this.pointer.replaceChildren();
      this.chosen = which;
      this.told.setAttribute("aria-live", aloud ? "polite" : "off");
      if (which < 0) {
        this.told.textContent = "";
        return;
      }
      const [x, y, i, mark, place] = this.places[which];
      const color = this.color(i);
      if (number(mark[2]) && number(mark[3])) {
        const d = "M" + place(mark[2]).join(" ") + "L" + place(mark[3]).join(" ");
        draw(this.pointer, "path", { stroke: color, "stroke-width": 3, d });
      }
      draw(this.pointer, "circle", { cx: x, cy: y, r: 6, fill: "none", stroke: color, "stroke-width": 2 });
      const name = this.chart.series.length > 1 ? this.chart.series[i].name + ": " : "";
      this.told.textContent = name + (mark[4] || mark[0] + ", " + label(mark[1]));
    }

    point(event) {
      if (!this.places.length) return;
      const box = this.svg.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const bars = this.chart.kind === "bars";
      const far = this.places.map((place) => Math.hypot(bars ? 0 : place[0] - x, place[1] - y));
      const nearest = far.indexOf(Math.min(...far));
      const reach = bars ? 22 : 48;
      if (far[nearest] > reach) this.tell(-1);
      else if (nearest !== this.chosen) this.tell(nearest);
    }

    key(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const count = this.places.length;
      if (!step || !count) return;
      event.preventDefault();
      const from = this.chosen < 0 && step < 0 ? 0 : this.chosen;
      this.tell((from + step + count) % count, true);
    }
  }

  const charts = JSON.parse(document.getElementById("data").textContent);
  for (const chart of charts) {
    for (const series of chart.series) series.marks = series.marks.filter((mark) => number(mark[1]));
  }
  for (const host of document.querySelectorAll(".chart")) new Chart(host, charts[Number(host.dataset.chart)]);
})();
