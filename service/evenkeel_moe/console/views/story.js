/** The course of a plan: its waves as a timeline, the ranks now, and the events in order. */

import { bytes, duration, percent, timeOfDay } from "../lib/format.js";
import { hasEnded, rankWords, storyRange, storyRows, waveSpans } from "../lib/timeline.js";
import { html, Moment, Section, Table } from "../ui.js";

/** The waves as bars over time. */
export function Timeline({ plan, now }) {
  const spans = waveSpans(plan.story);
  if (!spans.length) return "";
  const [first, last] = storyRange(plan.story, now, hasEnded(plan));
  const place = (from, to) => ({
    left: `${(100 * (from - first)) / (last - first)}%`,
    width: `max(4px, ${(100 * (to - from)) / (last - first)}%)`,
  });
  return html`<${Section}
    title="Timeline"
    note=${`From ${timeOfDay(first)} to ${timeOfDay(last)} UTC, ${duration(last - first)}.`}
  >
    <ul class="timeline">
      ${spans.map((span) => {
        const wave = plan.wave_list[span.index];
        const took = duration((span.to ?? now) - span.from);
        const state = span.committed ? "committed" : span.to === null ? "running" : "not committed";
        return html`<li key=${span.from}>
          <span class="timeline-name">Wave ${span.index + 1}</span>
          <span class="timeline-track"
            ><span
              class="timeline-bar ${state.split(" ")[0]}"
              style=${place(span.from, span.to ?? now)}
            ></span
          ></span>
          <span class="timeline-words"
            >${state}, ${took}${wave ? `, ${bytes(wave.nbytes)}` : ""}</span
          >
        </li>`;
      })}
    </ul>
  <//>`;
}

/** What every rank does now, and the bytes that it has staged. */
export function RankStates({ plan, deployment }) {
  const ranks = deployment?.ranks;
  if (!ranks || plan.phase === "proposed" || deployment.active_plan?.plan_id !== plan.plan_id)
    return "";
  const { staging_bytes_done: done, staging_bytes_total: total } = deployment;
  return html`<${Section} title="Ranks now">
    ${
      total
        ? html`<p>
            <label for="staged">Staged in this wave</label>
            <progress id="staged" max=${total} value=${done}></progress>
            <span>${` ${bytes(done)} of ${bytes(total)} (${percent(done / total)})`}</span>
          </p>`
        : html`<p class="hint">No rank has told staged bytes of this wave yet.</p>`
    }
    <ul class="chips">
      ${ranks.map(
        (rank) =>
          html`<li key=${rank.rank} class="chip ${rank.state}">
            rank ${rank.rank}: ${rankWords(rank)}
          </li>`,
      )}
    </ul>
  <//>`;
}

/** The events in order. */
export function Story({ plan, now }) {
  return html`<${Section} title="Story">
    <${Table}
      caption="Events"
      rows=${storyRows(plan)}
      columns=${[
        { title: "When", of: (row) => html`<${Moment} unix=${row.at} now=${now} />` },
        { title: "UTC", of: (row) => timeOfDay(row.at) },
        { title: "Event", text: true, of: (row) => row.words },
        { title: "Phase", of: (row) => row.phase },
        { title: "Detail", of: (row) => row.detail },
      ]}
    />
  <//>`;
}
