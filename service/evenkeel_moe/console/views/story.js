/** The course of a plan: its waves as a timeline, the ranks now, and the events in order. */

import { bytes, duration, percent, text, timeOfDay } from "../lib/format.js";
import { rankCondition } from "../lib/ranks.js";
import { storyRange, tookWords, waveSpans } from "../lib/timeline.js";
import { Badge, html, Moment, plain, Section, Table, wordy } from "../ui.js";

const FEW_BARS = 32;
const NOT_SEEN =
  "It is unknown what each rank took in this wave: the plan is older than this figure, or another" +
  " controller saw the wave end.";

/** The waves as bars over time, and in each the ranks. */
export function Timeline({ plan, now }) {
  const spans = waveSpans(plan.story);
  if (!spans.length) return "";
  const [first, last] = storyRange(plan.story, now, plan.ended);
  const bars = spans.reduce((sum, { ranks }) => sum + (ranks?.length ?? 0), 0);
  const isShort = bars <= FEW_BARS;
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
          <${WaveRanks} span=${span} place=${place} open=${isShort} />
        </li>`;
      })}
    </ul>
  <//>`;
}

/** What each rank took for a wave that is over, on the same time as the wave. */
function WaveRanks({ span, place, open }) {
  const { ranks, numRanks, from, to, index } = span;
  if (!ranks) return to === null ? "" : html`<p class="wave-ranks hint">${NOT_SEEN}</p>`;
  const all = ranks.length === numRanks;
  return html`<details class="wave-ranks" open=${open}>
    <summary>
      Ranks in wave ${index + 1}${all ? "" : `: the slowest ${ranks.length} of ${numRanks}`}
    </summary>
    <ul class="timeline">
      ${ranks.map(
        (rank) =>
          html`<li key=${rank.rank}>
            <span class="timeline-name">Rank ${rank.rank}</span>
            <span class="timeline-track">
              ${partsOf(rank).map(
                ([kind, first, last]) =>
                  html`<span
                    class="timeline-bar ${kind}"
                    style=${place(from + first, from + last)}
                  ></span>`,
              )}</span
            >
            <span class="timeline-words">${tookWords(rank)}</span>
          </li>`,
      )}
    </ul>
  </details>`;
}

/** The bars of a rank: until its vote, and from the vote until it has swapped. */
function partsOf({ voted_s: voted, swapped_s: swapped }) {
  const parts = voted === null ? [] : [["staging", 0, voted]];
  return swapped === null ? parts : [...parts, ["swapping", voted ?? 0, swapped]];
}

/** What every rank does now, and the bytes that it has staged. */
export function RankStates({ plan, deployment }) {
  const ranks = deployment?.ranks;
  if (!ranks || deployment.active_plan?.plan_id !== plan.plan_id) return "";
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
      ${ranks.map((rank) => {
        const { kind, words } = rankCondition(rank, deployment);
        return html`<li key=${rank.rank}>
          <${Badge} kind=${kind}>rank ${rank.rank}: ${words}, epoch ${text(rank.epoch)}<//>
        </li>`;
      })}
    </ul>
  <//>`;
}

/** The events in order. */
export function Story({ plan, now }) {
  return html`<${Section} title="Story">
    <${Table}
      caption="Events"
      rows=${plan.story}
      columns=${[
        plain("When", (row) => html`<${Moment} unix=${row.at} now=${now} />`),
        plain("UTC", (row) => timeOfDay(row.at)),
        wordy("Event", (row) => row.text),
        plain("Phase", (row) => row.phase_text),
      ]}
    />
  <//>`;
}
