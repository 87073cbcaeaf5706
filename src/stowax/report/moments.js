// Where in the step a time lies: the moment of a curve, every turn of a lane's loops.
"use strict";

// The last place in `sorted` whose value is not above `value`, or 0.
function lastUpTo(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 1);
}

// The highest of the moments at one time: what costs no time leaves several.
function momentAt(curve, seconds) {
  let best = lastUpTo(curve.seconds, seconds);
  for (let i = best; i >= 0 && curve.seconds[i] === curve.seconds[best]; i--) {
    if (curve.total[i] > curve.total[best]) best = i;
  }
  return best;
}

const MOST_TIMES = 1000; // of one interval: no stack of layers is deeper
// Every time of every interval of a lane, in order of their starts.
function spread(lane) {
  const times = [];
  for (let k = 0; k < lane.name.length; k++) {
    let turns = lane.count[k];
    for (const [outside] of lane.around[k]) turns = Math.floor(turns / outside);
    const loops = [[turns, lane.period[k]], ...lane.around[k]];
    let starts = [lane.start[k]];
    for (const [count, period] of loops) {
      const first = starts;
      starts = [];
      for (let turn = 0; turn < count && starts.length < MOST_TIMES; turn++) {
        for (const start of first) starts.push(start + turn * period);
      }
    }
    const length = lane.end[k] - lane.start[k];
    for (const start of starts.slice(0, MOST_TIMES)) times.push([start, start + length, k]);
  }
  times.sort((a, b) => a[0] - b[0]);
  return {
    start: Float64Array.from(times, (t) => t[0]),
    end: Float64Array.from(times, (t) => t[1]),
    which: Uint32Array.from(times, (t) => t[2]),
  };
}
