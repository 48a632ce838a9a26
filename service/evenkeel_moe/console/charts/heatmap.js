/** A matrix of loads as a picture: one cell a layer and a rank or expert. */

import { useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { colourOf, css, HOT, inkOn, paint, SCALE_STOPS } from "../lib/colour.js";
import { number } from "../lib/format.js";
import { useDark, useWidth } from "../net/poll.js";
import { html } from "../ui.js";

const LEFT = 52;
const TOP = 36;
const MARK_FROM = 7;

/** Sizes of the drawing, in CSS pixels. */
function layout(rows, width) {
  const columns = rows[0].length;
  const cellWidth = Math.max(2, (width - LEFT) / columns);
  const cellHeight = Math.max(6, Math.min(26, Math.round(620 / rows.length)));
  return {
    columns,
    cellWidth,
    cellHeight,
    width: LEFT + cellWidth * columns,
    height: TOP + cellHeight * rows.length,
  };
}

/**
 * @param {{rows: (number | null)[][], column: string,
 *   onPick: (row: number, column: number) => void}} props `column` names what a column is
 */
export function HeatMap({ rows, column, onPick }) {
  const [element, width] = useWidth();
  const canvas = useRef(null);
  const dark = useDark();
  const [at, setAt] = useState([0, 0]);
  const size = useMemo(
    () => (width ? layout(rows, width) : null),
    [width, rows.length, rows[0].length],
  );
  const image = useMemo(() => picture(rows, dark), [rows, dark]);
  const row = Math.min(at[0], rows.length - 1);
  const col = Math.min(at[1], rows[0].length - 1);
  useLayoutEffect(() => {
    if (size) draw(canvas.current, image, rows, size, [row, col], column, dark);
  }, [size, image, row, col, column, dark]);
  const move = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - LEFT) / size.cellWidth);
    const y = Math.floor((event.clientY - box.top - TOP) / size.cellHeight);
    if (x >= 0 && y >= 0 && x < rows[0].length && y < rows.length) setAt([y, x]);
  };
  const keys = (event) => {
    const step = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      Home: [0, -1e9],
      End: [0, 1e9],
    }[event.key];
    if (event.key === "Enter") onPick(row, col);
    if (!step) return;
    event.preventDefault();
    const within = (value, most) => Math.max(0, Math.min(most - 1, value));
    setAt([within(row + step[0], rows.length), within(col + step[1], rows[0].length)]);
  };
  const value = rows[row][col];
  const load = value === null ? "load unknown" : `${number(value, 2)} times the layer's mean`;
  const words = `Layer ${row}, ${column} ${col}: ${load}`;
  return html`<div ref=${element}>
    <p class="readout" role="status">${words}</p>
    <div class="scroll">
      <canvas
        ref=${canvas}
        class="heatmap"
        tabindex="0"
        role="img"
        aria-label="Heat map. ${words}. The arrow keys move; Enter shows the layer's slots."
        onPointerMove=${move}
        onKeyDown=${keys}
        onClick=${() => onPick(row, col)}
      ></canvas>
    </div>
    <${Scale} />
  </div>`;
}

/** The matrix as an image of one pixel a cell. */
function picture(rows, dark) {
  const { width, height, pixels } = paint(rows, dark);
  const made = new OffscreenCanvas(width, height);
  made.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
  return made;
}

function draw(canvas, image, rows, size, [row, col], column, dark) {
  const { cellWidth, cellHeight, width, height } = size;
  const context = blank(canvas, width, height);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, LEFT, TOP, width - LEFT, height - TOP);
  if (cellWidth >= MARK_FROM && cellHeight >= MARK_FROM) marks(context, rows, size, dark);
  labels(context, size, rows.length, column, dark);
  context.strokeStyle = dark ? "#fff" : "#000";
  context.lineWidth = 2;
  context.strokeRect(
    LEFT + col * cellWidth - 1,
    TOP + row * cellHeight - 1,
    cellWidth + 2,
    cellHeight + 2,
  );
}

/** Clears the canvas and makes it as large as asked, in CSS pixels; returns its context. */
export function blank(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [wide, high] = [width, height].map((length) => Math.round(length * ratio));
  const context = canvas.getContext("2d");
  // A canvas whose size is set again loses its memory, so that moving the cursor takes longer.
  if (canvas.width !== wide || canvas.height !== high) {
    Object.assign(canvas, { width: wide, height: high });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** A dot in every cell with much load, and a cross in every cell whose load is unknown. */
function marks(context, rows, { cellWidth, cellHeight }, dark) {
  rows.forEach((cells, y) =>
    cells.forEach((load, x) => {
      if (load !== null && load < HOT) return;
      const [cx, cy] = [LEFT + (x + 0.5) * cellWidth, TOP + (y + 0.5) * cellHeight];
      context.fillStyle = inkOn(colourOf(load, dark));
      if (load === null) context.fillRect(cx - 2, cy - 0.5, 4, 1);
      else context.fillRect(cx - 1.5, cy - 1.5, 3, 3);
    }),
  );
}

function labels(context, { columns, cellWidth, cellHeight }, count, column, dark) {
  context.fillStyle = dark ? "#b6bcc6" : "#4a515c";
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillText(`${column} →`, LEFT, 8);
  context.textAlign = "right";
  context.fillText("layer ↓", LEFT - 6, TOP - 11);
  const everyRow = Math.max(1, Math.ceil(14 / cellHeight));
  for (let y = 0; y < count; y += everyRow)
    context.fillText(String(y), LEFT - 6, TOP + (y + 0.5) * cellHeight);
  context.textAlign = "center";
  const everyColumn = Math.max(1, Math.ceil(30 / cellWidth));
  for (let x = 0; x < columns; x += everyColumn)
    context.fillText(String(x), LEFT + (x + 0.5) * cellWidth, TOP - 11);
}

/** The colours with their numbers. */
export function Scale({ short = false }) {
  const dark = useDark();
  return html`<ul class="scale" aria-label="Colours: load as a multiple of the layer's mean">
      ${SCALE_STOPS.map((stop) => {
        const colour = colourOf(stop, dark);
        return html`<li key=${stop} style=${{ background: css(colour), color: inkOn(colour) }}>
          ${stop}${stop === 3 ? "+" : ""}
        </li>`;
      })}
      <li class="unknown">– unknown</li>
    </ul>
    ${
      short
        ? ""
        : html`<p class="hint">
            1 is the mean of the layer. A dot marks cells from ${HOT} on, where cells are large
            enough.
          </p>`
    }`;
}
