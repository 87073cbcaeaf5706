// The step's drawing: what a zoom shows, what the pointer or an arrow key reads.
"use strict";

class Step {
  constructor(data, views, units) {
    Object.assign(this, { data, units });
    this.doc = views.roots[0].model.document;
    this.axis = this.doc.get_model_by_name("step");
    this.box = document.getElementById("step");
    this.plots = {};
    this.drawn = {};
    for (const name of [...Object.keys(data.curves).map((k) => `memory-${k}`), "lanes"]) {
      const model = this.doc.get_model_by_name(name);
      if (model) this.plots[name] = findView(views.roots[0], model);
    }
    this.kinds = Object.keys(data.curves);
    for (const kind of this.kinds) {
      const curve = data.curves[kind];
      curve.seconds = Float64Array.from(curve.seconds);
      curve.values = curve.values.map((column) => Float64Array.from(column));
      curve.total = curve.seconds.map((_, i) => curve.values.reduce((sum, c) => sum + c[i], 0));
      for (const field of ["bytes", "first", "last", "role"]) {
        curve.blocks[field] = Float64Array.from(curve.blocks[field]);
      }
    }
    data.lanes.forEach((lane) => Object.assign(lane, { times: spread(lane) }));
    this.now = this.kinds.length ? data.curves[this.kinds[0]].peakSeconds : 0;
    this.listen();
    this.redraw();
  }

  get scale() { return this.units.time; }
  get any() { return Object.values(this.plots)[0]; }
  get range() { return [this.axis.start * this.scale, this.axis.end * this.scale]; }
  get pixels() { return Math.max(200, this.any.frame.bbox.width); }

  show(low, high) {
    const shortest = this.data.end / 1e6, end = this.data.end;
    const width = Math.min(end, Math.max(shortest, high - low));
    const start = Math.min(Math.max(0, low), end - width);
    this.axis.setv({ start: start / this.scale, end: (start + width) / this.scale });
  }

  zoom(factor) {
    const [low, high] = this.range;
    const centre = this.now >= low && this.now <= high ? this.now : (low + high) / 2;
    this.show(centre - (centre - low) * factor, centre + (high - centre) * factor);
  }

  // Bokeh announces every change of the range; a frame of the screen draws once.
  later() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.redraw(); });
  }

  redraw() {
    for (const kind of this.kinds) this.drawCurve(kind);
    if (this.plots.lanes) this.drawLanes();
    this.placeCursor();
  }

  // As many steps as there are pixels, each the highest moment of its stretch.
  drawCurve(kind) {
    const curve = this.data.curves[kind], [low, high] = this.range;
    const from = lastUpTo(curve.seconds, low);
    const until = lastUpTo(curve.seconds, high) + 1;
    let chosen = [];
    if (until - from <= this.pixels * 1.5) {
      for (let i = from; i < until; i++) chosen.push(i);
    } else {
      let bin = -1;
      for (let i = from; i < until; i++) {
        const here = Math.floor(((curve.seconds[i] - low) / (high - low)) * this.pixels);
        if (here !== bin) { chosen.push(i); bin = here; }
        else if (curve.total[i] > curve.total[chosen.at(-1)]) chosen[chosen.length - 1] = i;
      }
    }
    const x = [], columns = Array.from({ length: curve.bands.length + 1 }, () => []);
    chosen.forEach((i, k) => {
      const right = k + 1 < chosen.length ? curve.seconds[chosen[k + 1]] : Math.max(high, curve.seconds[i]);
      x.push(curve.seconds[i] / this.scale, right / this.scale);
      let sum = 0;
      columns[0].push(0, 0);
      curve.values.forEach((column, band) => {
        sum += column[i] / this.units[kind];
        columns[band + 1].push(sum, sum);
      });
    });
    const found = { x };
    columns.forEach((column, k) => { found[`c${k}`] = column; });
    this.doc.get_model_by_name(`memory-${kind}-source`).data = found;
    this.doc.get_model_by_name(`memory-${kind}-names`).data =
      bandNames(curve.bands, found, this.plots[`memory-${kind}`].frame, this.data.looks,
        { x: curve.peakSeconds / this.scale, y: curve.peak / this.units[kind] }, this.now / this.scale);
    this.drawn[kind] = chosen.length;
  }

  drawLanes() {
    const [low, high] = this.range, pixel = (high - low) / this.pixels;
    const parts = { busy: [], waits: [] };
    const shift = this.data.loops.length ? 1 : 0;
    this.data.lanes.forEach((lane, k) => {
      const { start, end, which } = lane.times, last = { busy: null, waits: null };
      for (let i = 0; i < start.length && start[i] <= high; i++) {
        if (end[i] < low) continue;
        const kind = lane.waits[which[i]] ? "waits" : "busy", before = last[kind];
        const part = { from: start[i], to: end[i], spent: end[i] - start[i], row: k + shift };
        // What is narrower than a pixel is drawn together with its neighbours; how high
        // says what share of the time they take.
        const together = before?.small && part.spent < pixel &&
          part.from - before.to < 3 * pixel && part.to - before.from < 4 * pixel;
        if (together) {
          before.to = Math.max(before.to, part.to);
          before.spent += part.spent;
        } else {
          part.small = part.spent < pixel;
          parts[kind].push((last[kind] = part));
        }
      }
    });
    const bars = (list) => {
      const widths = list.map((p) => Math.max(p.to - p.from, p.small ? 4 * pixel : pixel));
      const heights = list.map((p, i) => 0.72 * (p.small ? Math.max(0.12, p.spent / widths[i]) : 1));
      return {
        left: list.map((p) => p.from / this.scale),
        right: list.map((p, i) => (p.from + widths[i]) / this.scale),
        top: list.map((p, i) => -p.row - 0.36 + Math.min(0.72, heights[i])),
        bottom: list.map((p) => -p.row - 0.36),
        text: list.map(() => ""),
      };
    };
    const loops = this.data.loops;
    const fitting = loops.map(([from, to, title]) => {
      const room = Math.floor((to - from) / pixel / 6.3) - 1;
      return room >= title.length ? title : room >= title.split("×")[0].length + 1 ? title.split("×")[0] + "×" : "";
    });
    this.doc.get_model_by_name("busy-source").data = bars(parts.busy);
    this.doc.get_model_by_name("waits-source").data = bars(parts.waits);
    this.doc.get_model_by_name("loops-source").data = {
      left: loops.map(([from]) => from / this.scale), right: loops.map(([, to]) => to / this.scale),
      top: loops.map(() => 0.36), bottom: loops.map(() => -0.36), text: fitting,
    };
  }

  alive(kind, moment, most = Infinity, role = -1) {
    const curve = this.data.curves[kind], { first, last } = curve.blocks;
    const position = curve.position[moment], found = [];
    for (let b = 0; b < first.length && found.length < most; b++) { // largest first
      if (first[b] <= position && position <= last[b] && (role < 0 || curve.blocks.role[b] === role)) found.push(b);
    }
    return found;
  }

  word(number) { return number < 0 ? "" : this.data.names[number]; }

  describe(kind, block) {
    const b = this.data.curves[kind].blocks;
    return {
      bytes: b.bytes[block], padding: b.padding[block], role: this.data.roles[b.role[block]],
      name: this.word(b.name[block]), shape: this.word(b.shape[block]),
      framework: this.word(b.framework[block]), source: this.word(b.source[block]),
      short: this.word(b.short[block]),
    };
  }

  // The band, and the place within it, that lies at a height.
  pick(kind, moment, height) {
    const curve = this.data.curves[kind];
    let below = 0;
    for (let band = 0; band < curve.bands.length; band++) {
      const much = curve.values[band][moment];
      if (height <= below + much && much > 0) {
        const role = this.data.roles.indexOf(curve.bands[band]);
        if (role < 0) return { band: curve.bands[band], much };
        const blocks = this.alive(kind, moment, Infinity, role);
        const all = blocks.reduce((sum, b) => sum + curve.blocks.bytes[b], 0);
        let left = ((height - below) / much) * all;
        for (const b of blocks) {
          left -= curve.blocks.bytes[b];
          if (left <= 0) return { band: curve.bands[band], much, block: this.describe(kind, b) };
        }
        return { band: curve.bands[band], much };
      }
      below += much;
    }
    return null;
  }

  // The time is the reader's: a moment lasts until the next one.
  where(kind, moment, seconds) {
    const curve = this.data.curves[kind], loop = curve.loop[moment];
    const trip = loop < 0 ? "" : `, trip ${curve.trip[moment]} of ${this.word(loop)}`;
    return `${time(seconds)}${trip}`;
  }

  // The largest places at a moment; those of layers that are alike count as one.
  largest(kind, moment, most) {
    const found = new Map();
    for (const block of this.alive(kind, moment)) {
      const it = this.describe(kind, block);
      const key = [it.bytes, it.role, it.short, it.shape, it.source].join("\n");
      if (found.has(key)) found.get(key).count += 1;
      else found.set(key, Object.assign(it, { count: 1 }));
    }
    return [...found.values()].sort((a, b) => b.bytes * b.count - a.bytes * a.count).slice(0, most);
  }

  tipOfMemory(kind, seconds, height) {
    const curve = this.data.curves[kind], moment = momentAt(curve, seconds);
    const lines = [`${size(curve.total[moment])} of ${kind} memory at ${this.where(kind, moment, seconds)}`];
    const found = this.pick(kind, moment, height);
    if (found) lines.push(`${found.band}: ${size(found.much)}`);
    if (found?.block) lines.push("", ...this.lines(found.block));
    return lines.join("\n");
  }

  lines(block) {
    const padding = block.padding ? `, ${size(block.padding)} of it padding` : "";
    return [`${block.framework || block.name}`, `${size(block.bytes)}${padding}`,
      [block.shape, block.name].filter(Boolean).join(", "), block.source].filter(Boolean);
  }

  tipOfLane(seconds, row) {
    const shift = this.data.loops.length ? 1 : 0;
    if (shift && row === 0) {
      const loop = this.data.loops.find(([from, to]) => from <= seconds && seconds <= to);
      return loop ? `loop ${loop[2]}\n${time(loop[1] - loop[0])}` : "";
    }
    const lane = this.data.lanes[row - shift];
    if (!lane) return "";
    const { start, end, which } = lane.times, i = lastUpTo(start, seconds);
    const slack = (this.range[1] - this.range[0]) / this.pixels;
    if (!start.length || end[i] + slack < seconds) return "";
    const k = which[i], each = lane.end[k] - lane.start[k];
    const times = lane.count[k] > 1 ? `${time(each)}, ${lane.count[k]} times a step` : time(each);
    return `${lane.waits[k] ? "waiting: " : ""}${this.word(lane.name[k])}\n${times}`;
  }

  read(seconds) {
    this.now = Math.min(Math.max(0, seconds), this.data.end);
    this.placeCursor();
    const kind = this.kinds[0];
    if (!kind) {
      this.say(`${time(this.now)}. ${this.tipOfLane(this.now, this.data.loops.length ? 1 : 0)}`);
      return;
    }
    const curve = this.data.curves[kind], moment = momentAt(curve, this.now);
    const largest = this.largest(kind, moment, 12), top = largest[0];
    const host = this.data.curves.host && kind !== "host"
      ? `, ${size(this.data.curves.host.total[momentAt(this.data.curves.host, this.now)])} of host memory` : "";
    const line = top?.source ? `, ${top.source.split("/").pop()}` : "";
    this.say(`${this.where(kind, moment, this.now)}: ${size(curve.total[moment])} of ${kind} memory${host}.` +
      (top ? ` Largest: ${top.count > 1 ? `${top.count} × ` : ""}${top.role}, ${size(top.bytes * top.count)}, ${top.short}${line}.` : ""));
    for (const cell of document.querySelectorAll("[data-band]")) {
      const band = curve.bands.indexOf(cell.dataset.band);
      cell.textContent = band < 0 ? "" : size(curve.values[band][moment]);
    }
    document.querySelector("#here tbody")?.replaceChildren(...largest.map((it) => this.rowOf(it)));
  }

  rowOf(it) {
    const row = document.createElement("tr");
    const cells = [[size(it.bytes * it.count), "number"], [String(it.count), "number"],
      [it.role, "role"], [it.short, "long", it.framework], [it.shape, "text"],
      [it.source.split("/").pop(), "text", it.source]];
    for (const [text, name, whole] of cells) {
      const cell = row.insertCell();
      cell.textContent = text;
      cell.title = whole && whole !== text ? whole : "";
      cell.className = name;
      if (name !== "role") continue;
      const square = document.querySelector(`.legend [data-band="${text}"]`)?.parentNode.firstChild;
      if (square) cell.prepend(square.cloneNode());
    }
    return row;
  }

  say(text) {
    document.getElementById("reading").textContent = text;
    this.box.setAttribute("aria-valuetext", time(this.now));
    this.box.setAttribute("aria-valuenow", String(Math.round((this.now / this.data.end) * 1000)));
  }

  placeCursor() {
    const frame = this.any.frame, [low, high] = this.range;
    const line = document.getElementById("cursor");
    line.style.display = this.now < low || this.now > high ? "none" : "block";
    line.style.left = `${frame.bbox.left + ((this.now - low) / (high - low)) * frame.bbox.width}px`;
  }

  listen() {
    this.axis.change.connect(() => this.later());
    new ResizeObserver(() => this.later()).observe(this.box);
    this.box.addEventListener("mousemove", (event) => this.moved(event));
    this.box.addEventListener("mouseleave", () => this.tip(""));
    this.box.addEventListener("dblclick", () => this.show(0, this.data.end));
    this.box.addEventListener("wheel", (event) => {
      if (!event.shiftKey) return;
      event.preventDefault();
      const [low, high] = this.range, by = ((high - low) * (event.deltaX || event.deltaY)) / 1000;
      this.show(low + by, high + by);
    }, { passive: false });
    this.box.addEventListener("keydown", (event) => this.pressed(event));
    for (const button of document.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => this.act(button.dataset.do));
    }
  }

  moved(event) {
    for (const [name, view] of Object.entries(this.plots)) {
      const place = view.el.getBoundingClientRect(), frame = view.frame;
      const x = event.clientX - place.left, y = event.clientY - place.top, box = frame.bbox;
      if (x < box.left || x > box.right || y < box.top || y > box.bottom) continue;
      const seconds = frame.x_scale.invert(x) * this.scale, height = frame.y_scale.invert(y);
      const text = name === "lanes" ? this.tipOfLane(seconds, Math.round(-height))
        : this.tipOfMemory(name.slice(7), seconds, height * this.units[name.slice(7)]);
      this.read(seconds);
      this.tip(text, event);
      return;
    }
    this.tip("");
  }

  tip(text, event) {
    const tip = document.getElementById("tip");
    tip.textContent = text;
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    const box = this.box.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    tip.style.left = `${Math.max(0, x + 16 + own.width > box.width ? x - own.width - 16 : x + 16)}px`;
    tip.style.top = `${y + 16}px`;
  }

  act(what) {
    if (what === "in") this.zoom(0.5);
    else if (what === "out") this.zoom(2);
    else if (what === "all") this.show(0, this.data.end);
    else if (what === "peak" && this.kinds.length) {
      this.goTo(this.data.curves[this.kinds[0]].peakSeconds);
    }
  }

  goTo(seconds) {
    const [low, high] = this.range, half = (high - low) / 2;
    if (seconds < low || seconds > high) this.show(seconds - half, seconds + half);
    this.read(seconds);
  }

  pressed(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const [low, high] = this.range, step = (high - low) / (event.shiftKey ? 10 : 100);
    const keys = {
      ArrowLeft: () => this.goTo(Math.max(0, this.now - step)),
      ArrowRight: () => this.goTo(Math.min(this.data.end, this.now + step)),
      PageUp: () => this.goTo(Math.max(0, this.now - step * 10)),
      PageDown: () => this.goTo(Math.min(this.data.end, this.now + step * 10)),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.data.end),
      "+": () => this.act("in"), "=": () => this.act("in"), "-": () => this.act("out"),
      0: () => this.act("all"), p: () => this.act("peak"),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }
}

function findView(root, model) {
  if (root.model === model) return root;
  for (const child of root.child_views || []) {
    const found = findView(child, model);
    if (found) return found;
  }
  return null;
}
