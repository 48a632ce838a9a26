/** Capacity: more or fewer extra replicas against the KV cache and goodput. */

import { useCallback, useEffect, useState } from "../vendor/hooks.js";
import { bytes, count, number, percent, signedPercent, UNKNOWN } from "../lib/format.js";
import { deploymentPath } from "../net/api.js";
import {
  Badge,
  Facts,
  html,
  Moment,
  numeric,
  plain,
  Problem,
  Section,
  Table,
  wordy,
} from "../ui.js";

const MOST_AGE_S = 300;
const SLOW_MS = 180_000;
const KINDS = { recommend: "good", not_now: "plain", insufficient_evidence: "warn" };

/** The recommendation. Computing it takes processor time, so it is asked for once. */
function useRecommendation(api, name) {
  const [state, setState] = useState({ data: null, error: null, busy: true });
  const ask = useCallback(
    async (mostAge) => {
      setState((old) => ({ ...old, busy: true }));
      try {
        const data = await api.get(
          `${deploymentPath(name)}/recommendation?max_age_s=${mostAge}`,
          SLOW_MS,
        );
        setState({ data, error: null, busy: false });
      } catch (error) {
        setState((old) => ({ ...old, error, busy: false }));
      }
    },
    [api, name],
  );
  useEffect(() => {
    ask(MOST_AGE_S);
  }, [ask]);
  return { ...state, ask };
}

export function Capacity({ api, name, now }) {
  const { data, error, busy, ask } = useRecommendation(api, name);
  const again = html`<button
    type="button"
    class="button"
    id="compute"
    disabled=${busy}
    onClick=${() => ask(0)}
  >
    ${busy ? "Computing…" : "Compute again"}
  </button>`;
  return html`<${Section} title="Recommendation" actions=${again}>
      <${Problem} error=${error} />
      ${data ? html`<${Advice} advice=${data} now=${now} />` : ""}
      ${busy && !data ? html`<p class="empty" aria-busy="true">Computing…</p>` : ""}
    <//>
    ${
      data
        ? html`<${Replicas} advice=${data} />
            <${CraftLayers} found=${data.redundancy?.craft_allocation} />
            <${Policies} rows=${data.policies} />`
        : ""
    }`;
}

function Advice({ advice, now }) {
  return html`<p class="answer">
      <${Badge} kind=${KINDS[advice.call] ?? "plain"}>${advice.call_text}<//> ${advice.reason_text}
    </p>
    <ul class="words">
      ${advice.words.map((line, i) => html`<li key=${i}>${line}</li>`)}
    </ul>
    <${Facts}
      rows=${[
        ["Computed", html`<${Moment} unix=${advice.at} now=${now} />`],
        ["Policy", advice.policy],
        ["Planned on", `${count(advice.planned_on_steps)} steps`],
        ["Scored on", `${count(advice.scored_on_steps)} later steps`],
        ["Free memory of the fullest rank", bytes(advice.free_bytes)],
        ["Cost model", advice.cost_model.words],
      ]}
    />`;
}

function Replicas({ advice }) {
  const { redundancy, replica_tradeoff: tradeoff } = advice;
  if (!tradeoff)
    return html`<${Section} title="Extra replicas"
      ><p class="empty">There are too few steps to compare numbers of extra replicas.</p><//
    >`;
  const advised = (row) => row.rule === "uniform" && row.level === redundancy?.advised;
  const mark = (row) =>
    html`<span class="nowrap"
      >${row.rule === "uniform" ? `${row.level} in every layer` : `CRAFT, R = ${row.level}`}
      ${row.present ? html` <${Badge} kind="info">present<//>` : ""}
      ${advised(row) ? html` <${Badge} kind="good">advised by MoE time<//>` : ""}</span
    >`;
  return html`<${Section} title="Extra replicas against KV cache" note=${tradeoff.words}>
    ${tradeoff.craft_words ? html`<p class="note">${tradeoff.craft_words}</p>` : ""}
    <${Table}
      caption="Numbers of extra replicas"
      rows=${tradeoff.rows}
      keyOf=${(row) => `${row.rule} ${row.level}`}
      columns=${[
        plain("Extra replicas", mark),
        numeric("Total", (row) => count(row.replicas)),
        numeric("Balancedness", (row) => number(row.balancedness)),
        numeric("MoE time saved", (row) => signedPercent(row.gain)),
        numeric("More memory per rank", (row) => bytes(row.extra_bytes_per_rank)),
        numeric("KV tokens lost", (row) => count(row.kv_tokens_lost)),
        numeric("KV tokens then", (row) => count(row.kv_tokens)),
        numeric("Goodput", goodput),
      ]}
    />
    <${Facts}
      rows=${[
        [
          "KV cache of a token",
          tradeoff.kv ? bytes(tradeoff.kv.bytes_per_token) : UNKNOWN,
          tradeoff.kv ? "" : "Not every rank told its KV cache.",
        ],
        ["MoE share of a step", percent(tradeoff.moe_share)],
      ]}
    />
  <//>`;
}

/** What CRAFT would give each layer, and the layer's gain by its number of replicas. */
function CraftLayers({ found }) {
  if (!found || !found.counts.length) return "";
  const rows = found.replicas.map((replicas, layer) => ({
    layer,
    replicas,
    base: found.base[layer],
    gain: found.gain[layer],
  }));
  const note =
    `R = ${found.replication_factor}, the most extra replicas on a rank, over all layers.` +
    " Balancedness is that of the steps planned on.";
  return html`<${Section} title="CRAFT, layer by layer" note=${note}>
    <${Table}
      caption="Extra replicas of each layer"
      rows=${rows}
      keyOf=${(row) => row.layer}
      columns=${[
        numeric("Layer", (row) => count(row.layer)),
        numeric("Extra replicas", (row) => count(row.replicas)),
        numeric("Balancedness with none", (row) => number(row.base)),
        ...found.counts.map((replicas, k) =>
          numeric(`with ${replicas}`, (row) => number(row.base + row.gain[k])),
        ),
      ]}
    />
  <//>`;
}

function goodput({ goodput_lower: lower, goodput_upper: upper }) {
  return lower === upper
    ? signedPercent(lower)
    : `${signedPercent(lower)} to ${signedPercent(upper)}`;
}

function Policies({ rows }) {
  return html`<${Section} title="Planning algorithms on the same steps">
    <${Table}
      caption="Planning algorithms"
      rows=${rows}
      keyOf=${(row) => row.policy}
      columns=${[
        plain("Policy", (row) => row.policy),
        wordy("Outcome", (row) => row.reason_text),
        numeric("Copies", (row) => count(row.copies)),
        numeric("Bytes", (row) => bytes(row.nbytes)),
        numeric("Expected balancedness", (row) => number(row.balancedness_expected)),
        numeric("Predicted saving", (row) => percent(row.verdict?.gain)),
        plain("Detail", (row) => row.detail ?? ""),
      ]}
    />
  <//>`;
}
