/** Placements: what moves between two of them, and what a rank holds. */

/**
 * @typedef {{layer: number, expert: number, slot: number, rank: number, holders: number[],
 *   wave: number | null}} Move
 * @param {number[][]} base (layers, slots) logical expert of each slot, -1 if empty
 * @param {number[][]} target of the same shape
 * @param {number} slotsPerRank
 * @param {{index: number, layers: number[]}[]} [waves]
 * @returns {Move[]} One row for each copy between ranks, wave by wave: an expert that comes to a
 *   rank which did not hold it. `holders` are the ranks that held it. Changes within a rank cost no
 *   transfer.
 */
export function movesBetween(base, target, slotsPerRank, waves = []) {
  const waveOf = new Map(waves.flatMap(({ index, layers }) => layers.map((l) => [l, index])));
  const moves = [];
  target.forEach((row, layer) => {
    row.forEach((expert, slot) => {
      if (expert < 0 || expert === base[layer][slot]) return;
      const rank = Math.floor(slot / slotsPerRank);
      const holders = ranksOf(base[layer], expert, slotsPerRank);
      if (holders.includes(rank)) return;
      moves.push({ layer, expert, slot, rank, holders, wave: waveOf.get(layer) ?? null });
    });
  });
  return moves.sort((a, b) => (a.wave ?? 0) - (b.wave ?? 0));
}

/**
 * @param {number[]} row expert of each slot of one layer
 * @param {number} expert
 * @param {number} slotsPerRank
 * @returns {number[]} The ranks that hold the expert, each once.
 */
export function ranksOf(row, expert, slotsPerRank) {
  const found = new Set();
  row.forEach((held, slot) => {
    if (held === expert) found.add(Math.floor(slot / slotsPerRank));
  });
  return [...found];
}

/**
 * @param {number[][]} base
 * @param {number[][]} target
 * @returns {number[]} The layers whose slots differ.
 */
export function changedLayers(base, target) {
  return target.flatMap((row, layer) =>
    row.some((expert, slot) => expert !== base[layer][slot]) ? [layer] : [],
  );
}

/**
 * @param {number[][]} base
 * @param {number[][]} target
 * @returns {boolean} True if the two can be compared.
 */
export function sameShape(base, target) {
  return base.length === target.length && base.every((row, i) => row.length === target[i].length);
}

/**
 * @param {number[]} row expert of each slot of one layer
 * @returns {Map<number, number>} Replicas by expert; empty slots are left out.
 */
export function replicas(row) {
  const found = new Map();
  for (const expert of row) if (expert >= 0) found.set(expert, (found.get(expert) ?? 0) + 1);
  return found;
}

/**
 * @param {number} numRanks
 * @param {number} slotsPerRank
 * @param {number} width of the drawing in pixels
 * @param {number} [widest] width of a slot where there is room
 * @returns {{cell: number, cellHeight: number, label: number, blockWidth: number,
 *   blockHeight: number, columns: number, height: number}} Ranks as blocks of one row of slots, as
 *   many beside each other as fit. Slots become narrower, down to 14 pixels, to fit a block.
 */
export function slotLayout(numRanks, slotsPerRank, width, widest = 34) {
  const label = 58;
  const gap = 16;
  const fits = Math.floor((width - label - gap) / slotsPerRank);
  const cell = Math.max(14, Math.min(widest, fits));
  const cellHeight = 28;
  const blockWidth = label + slotsPerRank * cell + gap;
  const blockHeight = cellHeight + 8;
  const columns = Math.max(1, Math.floor((width + gap) / blockWidth));
  const height = Math.ceil(numRanks / columns) * blockHeight;
  return { cell, cellHeight, label, blockWidth, blockHeight, columns, height };
}
