/** Capacity: more or fewer extra replicas against the KV cache and goodput. */

import { useCallback, useEffect, useState } from "../vendor/hooks.js";
import { adviceWords, outcomeWords } from "../lib/advice.js";
import {
  bytes,
  count,
  number,
  percent,
  signedPercent,
  signedRange,
  UNKNOWN,
  wordsWithMinus,
} from "../lib/format.js";
import { deploymentPath } from "../net/api.js";
import { Badge, Facts, html, Moment, Problem, Section, Table } from "../ui.js";

const MOST_AGE_S = 300;
const SLOW_MS = 180_000;
const CALLS = {
  recommend: ["good", "A plan is recommended"],
  not_now: ["plain", "No plan now"],
  insufficient_evidence: ["warn", "Too little evidence"],
};

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

export function Capacity({ api, name, deployment, now }) {
  const { data, error, busy, ask } = useRecommendation(api, name);
  const mode = deployment?.mode;
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
      ${data ? html`<${Advice} advice=${data} mode=${mode} now=${now} />` : ""}
      ${busy && !data ? html`<p class="empty" aria-busy="true">Computing…</p>` : ""}
    <//>
    ${
      data
        ? html`<${Replicas} advice=${data} /><${Policies} rows=${data.policies} mode=${mode} />`
        : ""
    }`;
}

function Advice({ advice, mode, now }) {
  const [kind, words] = CALLS[advice.call] ?? ["plain", advice.call];
  return html`<p class="answer">
      <${Badge} kind=${kind}>${words}<//> ${adviceWords(advice.reason, mode)}
    </p>
    <ul class="words">
      ${advice.words.map((line, i) => html`<li key=${i}>${wordsWithMinus(line)}</li>`)}
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
  const note = wordsWithMinus(tradeoff.words);
  return html`<${Section} title="Extra replicas against KV cache" note=${note}>
    ${tradeoff.craft_words ? html`<p class="note">${wordsWithMinus(tradeoff.craft_words)}</p>` : ""}
    <${Table}
      caption="Numbers of extra replicas"
      rows=${tradeoff.rows}
      keyOf=${(row) => `${row.rule} ${row.level}`}
      columns=${[
        { title: "Extra replicas", of: mark },
        { title: "Total", numeric: true, of: (row) => count(row.replicas) },
        { title: "Balancedness", numeric: true, of: (row) => number(row.balancedness) },
        { title: "MoE time saved", numeric: true, of: (row) => signedPercent(row.gain) },
        {
          title: "More memory per rank",
          numeric: true,
          of: (row) => bytes(row.extra_bytes_per_rank),
        },
        { title: "KV tokens lost", numeric: true, of: (row) => count(row.kv_tokens_lost) },
        { title: "KV tokens then", numeric: true, of: (row) => count(row.kv_tokens) },
        {
          title: "Goodput",
          numeric: true,
          of: (row) =>
            row.goodput_lower === row.goodput_upper
              ? signedPercent(row.goodput_lower)
              : signedRange(row.goodput_lower, row.goodput_upper),
        },
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

function Policies({ rows, mode }) {
  return html`<${Section} title="Planning algorithms on the same steps">
    <${Table}
      caption="Planning algorithms"
      rows=${rows}
      keyOf=${(row) => row.policy}
      columns=${[
        { title: "Policy", of: (row) => row.policy },
        { title: "Outcome", text: true, of: (row) => outcomeWords(row.reason, mode) },
        { title: "Copies", numeric: true, of: (row) => count(row.copies) },
        { title: "Bytes", numeric: true, of: (row) => bytes(row.nbytes) },
        {
          title: "Expected balancedness",
          numeric: true,
          of: (row) => number(row.balancedness_expected),
        },
        { title: "Predicted saving", numeric: true, of: (row) => percent(row.verdict?.gain) },
        { title: "Detail", of: (row) => row.detail ?? "" },
      ]}
    />
  <//>`;
}
