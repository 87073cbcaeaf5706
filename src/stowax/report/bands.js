// The names in the bands of a memory drawing: each once, where its band is tallest.
"use strict";

const TALL = 17, BESIDE = 10; // pixels that a name takes of a band, and around it

const pencil = document.createElement("canvas").getContext("2d");

function widthOf(text) {
  pencil.font = "12px Helvetica, Arial, sans-serif";
  return pencil.measureText(text).width;
}

// Where a name of a width fits best between two lines, and meets nothing to avoid: the
// tallest stretch, of those that are as tall to a pixel the one nearest to `middle`. `x`, `low` and `high` are pixels of steps' corners.
function tallest(x, low, high, width, avoid, middle) {
  let best = null, most = 0;
  for (let from = 0; from < x.length; from++) {
    let bottom = low[from], top = high[from], to = from;
    while (top - bottom >= TALL && x[to] - x[from] < width && to < x.length - 1) {
      to += 1;
      bottom = Math.max(bottom, low[to]);
      top = Math.min(top, high[to]);
    }
    if (top - bottom < TALL || x[to] - x[from] < width) continue;
    const place = { tall: top - bottom, x: x[from] + width / 2, y: (bottom + top) / 2 };
    // Within a long stretch the name may stand anywhere.
    const until = from + 1 < x.length ? Math.max(x[to], x[from + 1]) : x[to];
    place.x = Math.max(place.x, Math.min(middle, until - width / 2));
    if (avoid.some((box) => meets(box, place, width))) continue;
    const nearer = best && Math.abs(place.x - middle) < Math.abs(best.x - middle);
    if (!best || place.tall > most + 1 || (place.tall > most - 1 && nearer)) best = place;
    most = Math.max(most, place.tall);
  }
  return best;
}

function meets([left, right, bottom, top], place, width) {
  return place.x + width / 2 > left && place.x - width / 2 < right &&
    place.y + TALL / 2 > bottom && place.y - TALL / 2 < top;
}

// Columns for the names: `drawn` is what the bands are drawn from, `frame` the plot's,
// `peak` where the peak has its sign and its figure, `line` where the reader's line is.
function bandNames(bands, drawn, frame, looks, peak, line) {
  const found = { x: [], y: [], text: [], ink: [], ground: [] };
  // Screens count from above: what is turned round here is turned back below.
  const across = (v) => frame.x_scale.compute(v), up = (v) => -frame.y_scale.compute(v);
  const x = Array.from(drawn.x, across);
  const lines = [...bands, ""].map((_, k) => Array.from(drawn[`c${k}`], up));
  const at = across(peak.x), high = up(peak.y);
  const avoid = [[at - 125, at + 125, high - 28, high],
    ...[at, across(line)].map((here) => [here - 8, here + 8, -Infinity, Infinity])];
  const middle = (frame.bbox.left + frame.bbox.right) / 2;
  bands.forEach((band, k) => {
    const place = tallest(x, lines[k], lines[k + 1], widthOf(band) + BESIDE, avoid, middle);
    if (!place) return;
    const [ground, ink] = looks[band];
    found.x.push(frame.x_scale.invert(place.x));
    found.y.push(frame.y_scale.invert(-place.y));
    found.text.push(band);
    found.ink.push(ink);
    found.ground.push(ground);
  });
  return found;
}
