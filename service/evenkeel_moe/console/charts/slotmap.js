/** The slots of one layer by rank: which expert each holds, its load, and the moves of a plan. */

import { useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { colourOf, css, HOT, inkOn } from "../lib/colour.js";
import { counted } from "../lib/format.js";
import { movesBetween, replicas, slotLayout } from "../lib/placement.js";
import { useDark, useWidth } from "../net/poll.js";
import { html } from "../ui.js";
import { blank, Scale } from "./heatmap.js";

/**
 * A layer to choose, and its slots.
 *
 * @param {{layers: number[], before: number[][], after: number[][] | null, slotsPerRank: number,
 *   loads: (number | null)[][] | null, first?: number}} props (layers, slots) experts before and
 *   after a plan; loads are (layers, experts) multiples of the mean
 */
export function LayerSlots({ layers, before, after, slotsPerRank, loads, first }) {
  const [chosen, setLayer] = useState(first ?? layers[0]);
  const layer = layers.includes(chosen) ? chosen : layers[0];
  return html`<div class="controls">
      <label for="slot-layer">Layer</label>
      <select
        id="slot-layer"
        value=${layer}
        onChange=${(event) => setLayer(Number(event.target.value))}
      >
        ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
      </select>
    </div>
    <${SlotMap}
      before=${before[layer]}
      after=${after ? after[layer] : null}
      slotsPerRank=${slotsPerRank}
      loads=${loads ? loads[layer] : null}
    />`;
}

/** One layer as a drawing, and in words. */
function SlotMap({ before, after, slotsPerRank, loads }) {
  const [element, width] = useWidth();
  const canvas = useRef(null);
  const dark = useDark();
  useLayoutEffect(() => {
    if (width) draw(canvas.current, { before, after, slotsPerRank, loads, width, dark });
  }, [width, before, after, loads, dark]);
  return html`<div ref=${element}>
    <p class="note">${words(before, after, slotsPerRank)}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Slots of the layer">
      <canvas
        ref=${canvas}
        class="slotmap"
        role="img"
        aria-label=${words(before, after, slotsPerRank)}
      ></canvas>
    </div>
    <p class="hint">
      Each box is a slot with the number of its expert. An underlined expert has several replicas.
      ${after ? " A thick frame marks a slot that the plan changes: before → after." : ""}
    </p>
    ${loads ? html`<${Scale} short />` : ""}
  </div>`;
}

function words(before, after, slotsPerRank) {
  const several = [...replicas(before).values()].filter((times) => times > 1).length;
  const empty = before.filter((expert) => expert < 0).length;
  const parts = [
    `${counted(several, "expert")} with several replicas`,
    `${counted(empty, "empty slot")}`,
  ];
  if (after) {
    const copies = movesBetween([before], [after], slotsPerRank).length;
    parts.push(`${counted(copies, "copy", "copies")} between ranks`);
  }
  return `${parts.join(", ")}.`;
}

function draw(canvas, { before, after, slotsPerRank, loads, width, dark }) {
  const ranks = before.length / slotsPerRank;
  const changes = after !== null && before.some((expert, slot) => expert !== after[slot]);
  const box = slotLayout(ranks, slotsPerRank, width, changes ? 52 : 34);
  const full = Math.max(width, box.blockWidth);
  const context = blank(canvas, full, box.height);
  const ink = dark ? "#e8eaee" : "#1c2128";
  const several = replicas(before);
  for (let rank = 0; rank < ranks; rank += 1) {
    const x = (rank % box.columns) * box.blockWidth;
    const y = Math.floor(rank / box.columns) * box.blockHeight + 2;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = ink;
    context.fillText(`rank ${rank}`, x, y + box.cellHeight / 2);
    for (let i = 0; i < slotsPerRank; i += 1) {
      const slot = rank * slotsPerRank + i;
      const place = { x: x + box.label + i * box.cell, y, width: box.cell, height: box.cellHeight };
      drawSlot(context, place, before[slot], after ? after[slot] : before[slot], {
        loads,
        several,
        dark,
        ink,
      });
    }
  }
}

function drawSlot(context, { x, y, width, height }, expert, next, { loads, several, dark, ink }) {
  const load = expert >= 0 && loads ? loads[expert] : null;
  const known = load !== null && load !== undefined;
  const fill = known ? colourOf(load, dark) : null;
  context.fillStyle = fill ? css(fill) : dark ? "#23272f" : "#f1f2f4";
  context.fillRect(x + 1, y, width - 2, height);
  const changed = next !== expert;
  context.strokeStyle = changed ? (dark ? "#7fd4e6" : "#0b5566") : dark ? "#434a56" : "#c3c8d0";
  context.lineWidth = changed ? 3 : 1;
  context.strokeRect(
    x + (changed ? 2.5 : 1.5),
    y + (changed ? 1.5 : 0.5),
    width - (changed ? 5 : 3),
    height - (changed ? 3 : 1),
  );
  const shown = (value) => (value < 0 ? "–" : String(value));
  context.fillStyle = fill ? inkOn(fill) : ink;
  context.textAlign = "center";
  const text = changed ? `${shown(expert)}→${shown(next)}` : shown(expert);
  context.font = `${changed ? "bold " : ""}${width >= 30 ? 12 : 9}px system-ui, sans-serif`;
  context.fillText(text, x + width / 2, y + height / 2, width - (changed ? 10 : 4));
  if ((several.get(expert) ?? 0) > 1) context.fillRect(x + width / 2 - 6, y + height - 6, 12, 1.5);
  if (known && load >= HOT) context.fillRect(x + width - 8, y + height - 7, 3, 3);
}
