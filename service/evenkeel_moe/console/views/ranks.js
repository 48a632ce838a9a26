/** Ranks: where they run, how fast they are, and which of their reports were not used. */

import { bytes, count, isKnown, number, percent, text, UNKNOWN } from "../lib/format.js";
import { isLoadPast, rankCondition } from "../lib/health.js";
import { sentence } from "../lib/reasons.js";
import { deploymentPath } from "../net/api.js";
import { usePoll } from "../net/poll.js";
import { Badge, html, Loaded, Moment, Section, Table } from "../ui.js";

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
                { title: "Rank", numeric: true, of: (rank) => rank.rank },
                { title: "State", of: (rank) => html`<${Condition} ...${{ rank, deployment }} />` },
                { title: "Node", of: (rank) => html`<span class="nowrap">${rank.node}</span>` },
                {
                  title: "GPU",
                  of: (rank) =>
                    html`${text(rank.device)}<span class="hint">${rank.gpu_uuid}</span>`,
                },
                { title: "Epoch", numeric: true, of: (rank) => text(rank.epoch) },
                {
                  title: "Last seen",
                  of: (rank) => html`<${Moment} unix=${rank.last_seen_unix} now=${now} />`,
                },
                {
                  title: "Load / mean",
                  numeric: true,
                  of: (rank) =>
                    lastKnown(past, rank.load_share, (share) => number(share / mean, 2)),
                },
                {
                  title: "Time / median",
                  numeric: true,
                  of: (rank) => lastKnown(!rank.fresh, rank.slowness, (value) => number(value, 2)),
                },
                {
                  title: "Time per token",
                  numeric: true,
                  of: (rank) =>
                    lastKnown(
                      !rank.fresh,
                      rank.seconds_per_token,
                      (seconds) => `${number(seconds * 1e6, 2)} µs`,
                    ),
                },
                {
                  title: "Free memory",
                  numeric: true,
                  of: (rank) => lastKnown(!rank.fresh, rank.free_bytes, bytes),
                },
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
              {
                title: "Reason",
                text: true,
                of: (row) => html`${sentence(row.reason)} <code>${row.reason}</code>`,
              },
              { title: "Rank steps", numeric: true, of: (row) => count(row.rank_steps) },
              {
                title: "Newest",
                text: true,
                of: (row) =>
                  row.samples.length
                    ? `rank ${row.samples.at(-1).rank}: ${row.samples.at(-1).detail}`
                    : "",
              },
            ]}
          />`}<//
      >
    <//>`;
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
  const fresh = ranks.filter((rank) => rank.fresh).length;
  const shares = ranks.map((rank) => rank.load_share).filter((share) => share !== null);
  const most =
    shares.length === ranks.length && shares.length ? Math.max(...shares) * ranks.length : null;
  const share = most === null ? "an unknown share" : percent(most, 0);
  const has = isLoadPast({ ranks, shape }) ? "had, as last known," : "has";
  return (
    `${fresh} of ${count(shape?.num_ranks)} connected. The fullest ${has} ${share} of the mean. ` +
    "Time / median compares ranks at equal tokens; time per token depends on how many a rank has."
  );
}
