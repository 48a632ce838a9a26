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
 * @returns {object} Only the fields that differ. Text that is no number is sent as it is: the
 *   controller says what is wrong with it.
 */
export function policyChanges(document, form) {
  const changes = {};
  if (form.mode !== document.mode) changes.mode = form.mode;
  for (const name of ["cycle_s", "proposal_ttl_s"]) {
    const value = parsed(form[name]);
    if (value !== document[name]) changes[name] = value;
  }
  for (const group of ["thresholds", "limits"]) {
    for (const [name, typed] of Object.entries(form[group])) {
      const value = group === "limits" && typed.trim() === "" ? null : parsed(typed);
      if (value !== document[group][name]) changes[group] = { ...changes[group], [name]: value };
    }
  }
  return changes;
}

function parsed(typed) {
  const value = typed.trim() === "" ? NaN : Number(typed);
  return Number.isFinite(value) ? value : typed;
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
