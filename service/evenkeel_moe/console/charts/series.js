/** Balance over time, drawn by uPlot. */

import { useEffect, useRef } from "../vendor/hooks.js";
import uPlot from "../vendor/uplot.js";
import { columns, hasTime } from "../lib/history.js";
import { number, timeOfDay } from "../lib/format.js";
import { useDark, useWidth } from "../net/poll.js";
import { html } from "../ui.js";

/**
 * @param {{points: import("../lib/history.js").Point[], height: number, compact?: boolean,
 *   threshold?: number | null}} props `threshold` is drawn as a line
 */
export function BalanceChart({ points, height, compact = false, threshold = null }) {
  const [element, width] = useWidth();
  const chart = useRef(null);
  const dark = useDark();
  const data = withThreshold(columns(points), threshold);
  // Also the time in which no balance is known belongs to the picture.
  const span = useRef([0, 1]);
  if (points.length > 1) span.current = [points[0].at, points[points.length - 1].at];
  useEffect(() => {
    if (!width) return undefined;
    chart.current = new uPlot(options(width, height, compact, span), data, element.current);
    return () => chart.current.destroy();
  }, [width > 0, dark, compact]);
  useEffect(() => {
    chart.current?.setData(data);
  }, [points, threshold]);
  useEffect(() => {
    if (width) chart.current?.setSize({ width, height });
  }, [width, height]);
  const last = points.length ? points[points.length - 1] : null;
  const time = hasTime(points) ? `time balance ${number(last?.time)}, ` : "";
  const words = `${time}balancedness ${number(last?.tokens)}.`;
  return html`<div
    class="chart"
    ref=${element}
    role="img"
    aria-label="Balance over the last hour. Newest: ${words}"
  ></div>`;
}

/**
 * The names and strokes of the lines; each line has a dash of its own.
 *
 * @param {{time: boolean, threshold?: number | null}} props `time` is true if that line is drawn
 */
export function BalanceKey({ time, threshold = null }) {
  return html`<ul class="key">
    ${time && html`<li><span class="line time"></span>time balance</li>`}
    <li><span class="line tokens"></span>balancedness</li>
    ${
      threshold !== null &&
      html`<li><span class="line limit"></span>planning starts below ${number(threshold, 2)}</li>`
    }
  </ul>`;
}

function withThreshold(data, threshold) {
  return [...data, data[0].map(() => threshold)];
}

function options(width, height, compact, span) {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--muted"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
  return {
    width,
    height,
    tzDate: (unix) => uPlot.tzDate(new Date(unix * 1000), "Etc/UTC"),
    legend: { show: false },
    cursor: { show: !compact, points: { show: !compact } },
    padding: compact ? [4, 2, 4, 2] : [10, 30, 0, 0],
    scales: {
      x: { range: () => span.current },
      y: { range: (_, low) => [Math.min(0.5, Math.floor((low ?? 0) * 10) / 10), 1] },
    },
    axes: compact
      ? [{ show: false }, { show: false }]
      : [
          { ...axis, values: (_, moments) => moments.map(timeOfDay), space: 90 },
          { ...axis, size: 44 },
        ],
    series: [
      {},
      { stroke: colour("--accent"), width: 2, points: { show: false } },
      { stroke: colour("--second"), width: 2, dash: [5, 4], points: { show: false } },
      { stroke: colour("--muted"), width: 1, dash: [2, 3], points: { show: false } },
    ],
  };
}
