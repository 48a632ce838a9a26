/** The form of a policy: which fields differ, as the body of a PATCH. */

const LABELS = {
  cycle_s: "Cycle",
  proposal_ttl_s: "A proposal expires after",
  max_moves: "Copies of one plan",
  max_bytes: "Bytes of one plan",
  max_layers: "Layers of one plan",
};

/** @param {string} name of a field @returns {string} The same words on the page and in the form. */
export function labelOf(name) {
  return LABELS[name] ?? name;
}

/**
 * @param {object} document the policy as it was read
 * @param {object} form edited values: `mode`, `cycle_s`, `proposal_ttl_s`, `thresholds`, `limits`;
 *   numbers as the text that was typed, an empty limit is none
 * @returns {{changes: object, errors: string[]}} Only the fields that differ.
 */
export function policyChanges(document, form) {
  const changes = {};
  const errors = [];
  if (form.mode !== document.mode) changes.mode = form.mode;
  for (const name of ["cycle_s", "proposal_ttl_s"]) {
    const value = parse(name, form[name], errors);
    if (value !== null && value !== document[name]) changes[name] = value;
  }
  for (const [name, typed] of Object.entries(form.thresholds)) {
    const value = parse(name, typed, errors);
    if (value === null || value === document.thresholds[name]) continue;
    changes.thresholds = { ...changes.thresholds, [name]: value };
  }
  for (const [name, typed] of Object.entries(form.limits)) {
    const value = typed.trim() === "" ? null : parse(name, typed, errors);
    if (typed.trim() !== "" && value === null) continue;
    if (value === document.limits[name]) continue;
    changes.limits = { ...changes.limits, [name]: value };
  }
  return { changes, errors };
}

function parse(name, typed, errors) {
  const value = typed.trim() === "" ? NaN : Number(typed);
  if (Number.isFinite(value)) return value;
  errors.push(`${labelOf(name)}: “${typed}” is not a number.`);
  return null;
}

/**
 * @param {object} document the policy
 * @returns {object} The form with its values as text.
 */
export function formOf(document) {
  const shown = (values) =>
    Object.fromEntries(
      Object.entries(values).map(([name, value]) => [name, value === null ? "" : String(value)]),
    );
  return {
    mode: document.mode,
    cycle_s: String(document.cycle_s),
    proposal_ttl_s: String(document.proposal_ttl_s),
    thresholds: shown(document.thresholds),
    limits: shown(document.limits),
  };
}
