// The page's moving parts: tables that sort, light and dark, and the start of it all.
// Bokeh draws; the data comes packed in the page; the step's drawing is in step.js.
// Names from the program reach the page through textContent alone.
"use strict";

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function size(bytes) {
  let value = Math.abs(bytes), unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024) break;
    value /= 1024; unit = next;
  }
  const digits = unit === "B" ? 0 : value < 10 ? 2 : 1;
  return `${bytes < 0 ? "-" : ""}${value.toFixed(digits)} ${unit}`;
}

function time(seconds) {
  const much = Math.abs(seconds);
  if (much >= 1 || much === 0) return `${seconds.toFixed(2)} s`;
  if (much >= 1e-3) return `${(seconds * 1e3).toFixed(much < 1e-2 ? 3 : 2)} ms`;
  return `${(seconds * 1e6).toFixed(1)} µs`;
}

function sortTables() {
  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("th").forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const number = head.classList.contains("number");
        const before = head.getAttribute("aria-sort");
        // Figures start with the largest, words with the first.
        const up = before ? before === "descending" : !number;
        for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = Array.from(body.rows, (row) => [row, row.cells[column].dataset.sort]);
        const order = number
          ? (a, b) => Number(a[1]) - Number(b[1])
          : (a, b) => a[1].localeCompare(b[1], "en", { numeric: true });
        rows.sort((a, b) => (up ? order(a, b) : -order(a, b)));
        body.append(...rows.map(([row]) => row));
      });
    });
  }
}

// --- light and dark -----------------------------------------------------------------

const NARROW = matchMedia("(max-width: 40rem)");

function paint(models) {
  const style = getComputedStyle(document.documentElement);
  const [paper, ink, line] = ["--paper", "--ink", "--line"].map((name) =>
    style.getPropertyValue(name).trim());
  for (const model of models) {
    const set = (found) => model.setv(found);
    if (model.type === "Figure") {
      set({ outline_line_color: line });
    } else if (model.type.endsWith("Axis")) {
      set({ axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: ink,
        major_tick_line_color: ink, minor_tick_line_color: ink });
    } else if (model.type === "Grid") {
      if (model.grid_line_color !== null) set({ grid_line_color: line });
    } else if (model.type === "Label") {
      set({ text_color: ink });
      if (model.name === "label") set({ background_fill_color: paper });
    } else if (model.type === "Text") {
      if (model.text_color?.field !== "ink") set({ text_color: { value: ink } });
    } else if (model.type === "Legend") {
      set({ label_text_color: ink, background_fill_color: paper, border_line_color: line,
        ncols: NARROW.matches ? 1 : 2 });
    } else if (model.type === "GlyphRenderer" && model.name === "peak") {
      model.glyph.setv({ fill_color: { value: ink }, line_color: { value: ink } });
    }
  }
}

function followScheme() {
  const all = () => {
    for (const doc of Bokeh.documents) paint([...doc._all_models.values()]);
  };
  all();
  for (const query of [matchMedia("(prefers-color-scheme: dark)"), NARROW]) {
    query.addEventListener("change", all);
  }
}

// The drawing of time over memory: near the budget, or with every point.
function chooseRange(ranges) {
  const find = (name) => Bokeh.documents.map((doc) => doc.get_model_by_name(name)).find(Boolean);
  for (const button of document.querySelectorAll("[data-near]")) {
    button.addEventListener("click", () => {
      const [left, right, low, high] = button.dataset.near ? ranges.near : ranges.all;
      find("budget-x").setv({ start: left, end: right });
      find("budget-y").setv({ start: low, end: high });
    });
  }
}

async function start({ step, drawings, ranges, packed, units }) {
  sortTables();
  for (const [place, item] of Object.entries(drawings)) {
    await Bokeh.embed.embed_item(item, place);
  }
  if (ranges) chooseRange(ranges);
  if (step) {
    const [data, views] = await Promise.all([unpack(packed), Bokeh.embed.embed_item(step, "drawing")]);
    window.stowaxStep = new Step(data, views, units);
    window.stowaxStep.read(window.stowaxStep.now);
  }
  followScheme();
  performance.mark("ready");
  document.documentElement.dataset.ready = "yes";
}
