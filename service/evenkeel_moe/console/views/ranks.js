/** Ranks: where they run, how fast they are, and which of their reports were not used. */

import { bytes, count, duration, isKnown, number, percent, text, UNKNOWN } from "../lib/format.js";
import { isLoadPast, rankCondition } from "../lib/ranks.js";
import { deploymentPath } from "../net/api.js";
import { usePoll } from "../net/poll.js";
import { Badge, html, Loaded, Moment, numeric, plain, Section, Table, wordy } from "../ui.js";

const PERIOD_MS = 10_000;

export function Ranks({ api, name, deployment, now }) {
  const quarantine = usePoll(api, `${deploymentPath(name)}/quarantine`, PERIOD_MS);
  const ranks = deployment?.ranks;
  const mean = ranks?.length ? 1 / ranks.length : null;
  const past = ranks ? isLoadPast(deployment) : false;
  return html`<${Section} title="Ranks" note=${ranks ? summary(deployment) : ""}>
      ${
        ranks
          ? html`<${Table}
              caption="Ranks"
              rows=${ranks}
              keyOf=${(rank) => rank.rank}
              empty="No rank is connected."
              columns=${[
                numeric("Rank", (rank) => rank.rank),
                plain("State", (rank) => html`<${Condition} ...${{ rank, deployment }} />`),
                plain("Node", (rank) => html`<span class="nowrap">${rank.node}</span>`),
                plain(
                  "GPU",
                  (rank) => html`${text(rank.device)}<span class="hint">${rank.gpu_uuid}</span>`,
                ),
                numeric("Epoch", (rank) => text(rank.epoch)),
                plain(
                  "Last seen",
                  (rank) => html`<${Moment} unix=${rank.last_seen_unix} now=${now} />`,
                ),
                numeric("Load / mean", (rank) =>
                  lastKnown(past, rank.load_share, (share) => number(share / mean, 2)),
                ),
                numeric("Time / median", (rank) =>
                  lastKnown(!rank.fresh, rank.slowness, (value) => number(value, 2)),
                ),
                numeric("Time per token", (rank) =>
                  lastKnown(!rank.fresh, rank.seconds_per_token, duration),
                ),
                numeric("Free memory", (rank) => lastKnown(!rank.fresh, rank.free_bytes, bytes)),
              ]}
            />`
          : html`<p class="empty">The ranks are not known here.</p>`
      }
    <//>
    <${Section}
      title="Reports that were not used"
      note="Steps of ranks, since this replica leads or since the last reset."
    >
      <${Loaded} poll=${quarantine}
        >${({ items }) =>
          html`<${Table}
            caption="Quarantine"
            rows=${items}
            keyOf=${(row) => row.reason}
            empty="Every report was used."
            columns=${[
              wordy("Reason", (row) => html`${row.reason_text} <code>${row.reason}</code>`),
              numeric("Rank steps", (row) => count(row.rank_steps)),
              wordy("Newest", ({ samples }) => newestWords(samples.at(-1))),
            ]}
          />`}<//
      >
    <//>`;
}

function newestWords(sample) {
  return sample ? `rank ${sample.rank}: ${sample.detail}` : "";
}

/** A value as `show` writes it; grey and with words if it is not that of now. */
function lastKnown(past, value, show) {
  if (!isKnown(value)) return UNKNOWN;
  if (!past) return show(value);
  return html`<span class="note">${show(value)}</span><span class="hint">last known</span>`;
}

function Condition({ rank, deployment }) {
  const { kind, words } = rankCondition(rank, deployment);
  return html`<${Badge} kind=${kind}>${words}<//>${rank.fresh ? ` ${rank.trouble}` : ""}`;
}

function summary({ ranks, shape }) {
  const here = ranks.filter((rank) => rank.fresh && rank.epoch !== null).length;
  const shares = ranks.map((rank) => rank.load_share).filter((share) => share !== null);
  const most =
    shares.length === ranks.length && shares.length ? Math.max(...shares) * ranks.length : null;
  const share = most === null ? "an unknown share" : percent(most, 0);
  const has = isLoadPast({ ranks, shape }) ? "had, as last known," : "has";
  return (
    `${here} of ${count(shape?.num_ranks)} connected. The fullest ${has} ${share} of the mean. ` +
    "Time / median compares ranks at equal tokens; time per token depends on how many a rank has."
  );
}
