/** Load: layers x ranks and layers x experts, with the moments seen since the page was opened. */

import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { hottest } from "../lib/colour.js";
import { ago, count, number, timeOfDay } from "../lib/format.js";
import { reportedWords } from "../lib/ranks.js";
import { sameShape } from "../lib/placement.js";
import { deploymentPath } from "../net/api.js";
import { useEvery, usePoll } from "../net/poll.js";
import { HeatMap } from "../charts/heatmap.js";
import { LayerSlots } from "../charts/slotmap.js";
import { Choice, html, Loaded, numeric, Problem, Section, Table } from "../ui.js";

const PERIOD_MS = 5000;
const MOST_MOMENTS = 120;
const COMMITTED = "The committed placement.";
const NO_PLAN = "The committed placement. No plan on it waits or runs.";
const NOTHING = "The window has no steps of this phase, or the placement is unknown.";
const PHASES = [
  ["", "all"],
  ["prefill", "prefill"],
  ["decode", "decode"],
  ["mixed", "mixed"],
];

/** Asks for all parts of a heat map: a large one comes in several answers. */
async function wholeMap(api, path, phase) {
  const query = phase ? `&phase=${phase}` : "";
  const parts = [];
  for (let next = 0; next !== null; next = parts.at(-1).next_layer)
    parts.push(await api.get(`${path}/heatmap?first_layer=${next}${query}`));
  const [whole] = parts;
  const joined = (name) =>
    whole[name] === null ? null : parts.flatMap((part) => part[name] ?? []);
  return { ...whole, ranks: joined("ranks"), experts: joined("experts") };
}

/** The maps seen since the view was opened, oldest first. */
function useMoments(api, path, phase) {
  const [moments, setMoments] = useState([]);
  const [error, setError] = useState(null);
  const shown = useRef(phase);
  useEffect(() => {
    shown.current = phase;
    setMoments([]);
  }, [phase]);
  const ask = async () => {
    try {
      const map = { ...(await wholeMap(api, path, phase)), at: api.now() };
      setError(null);
      if (shown.current !== phase) return;
      setMoments((old) => {
        const last = old[old.length - 1];
        // The same steps are one moment, also if the placement has changed since.
        return last?.newest_step === map.newest_step
          ? [...old.slice(0, -1), { ...map, at: last.at }]
          : [...old, map].slice(-MOST_MOMENTS);
      });
    } catch (failure) {
      setError(failure);
    }
  };
  useEvery(ask, PERIOD_MS, [api, path, phase]);
  return { moments, error };
}

export function Load({ api, name, deployment, now }) {
  const [phase, setPhase] = useState("");
  const [across, setAcross] = useState("ranks");
  /** When the chosen moment was seen; null follows the newest one. */
  const [chosen, setChosen] = useState(null);
  const [layer, setLayer] = useState(0);
  const { moments, error } = useMoments(api, deploymentPath(name), phase);
  // A moment that is no longer kept gives way to the oldest one.
  const found = Math.max(0, moments.findIndex((each) => each.at === chosen));
  const index = chosen === null ? moments.length - 1 : found;
  const map = moments[index];
  const rows = map?.[across];
  return html`<${Section}
      title="Load of ${across}"
      note="Each cell is a load divided by the mean of its layer, over the steps of the window."
    >
      <div class="controls">
        <${Choice}
          legend="Columns"
          name="across"
          value=${across}
          onChange=${setAcross}
          options=${[
            ["ranks", "ranks"],
            ["experts", "experts"],
          ]}
        />
        <${Choice}
          legend="Phase"
          name="phase"
          value=${phase}
          onChange=${(value) => {
            setPhase(value);
            setChosen(null);
          }}
          options=${PHASES}
        />
      </div>
      <${Problem} error=${error} />
      <${Slider}
        moments=${moments}
        index=${index}
        now=${now}
        onChange=${(at) => setChosen(at === moments.length - 1 ? null : moments[at].at)}
      />
      ${
        rows?.length
          ? html`<${HeatMap}
                rows=${rows}
                column=${across.slice(0, -1)}
                onPick=${(row) => setLayer(row)}
              />
              <${Hottest} rows=${rows} column=${across.slice(0, -1)} />`
          : html`<p class="empty">${map ? NOTHING : error ? "" : "Loading…"}</p>`
      }
    <//>
    <${Slots}
      api=${api}
      name=${name}
      deployment=${deployment}
      loads=${map?.experts ?? null}
      layer=${layer}
    />`;
}

function Slider({ moments, index, now, onChange }) {
  if (!moments.length) return "";
  const map = moments[index];
  const live = index === moments.length - 1;
  const past = map.is_past;
  const reported = reportedWords(map, now);
  const when = live ? `Now, ${reported}` : `${timeOfDay(map.at)} UTC, ${ago(map.at, now)}`;
  const steps = `${count(map.steps)} steps up to step ${count(map.newest_step)}`;
  return html`<div class="slider">
    <label for="moment">Time</label>
    <input
      id="moment"
      type="range"
      min="0"
      max=${moments.length - 1}
      value=${index}
      disabled=${moments.length < 2}
      aria-valuetext="${timeOfDay(map.at)} UTC"
      onInput=${(event) => onChange(Number(event.target.value))}
    />
    <span>${`${live && past ? "Not current" : when}: ${steps}.`}</span>
    <span class="hint">Earlier moments are kept while this page is open.</span>
    ${live && past ? html`<${Past} words=${reported} />` : ""}
  </div>`;
}

/** Tells in place that what is drawn is not current. */
function Past({ words }) {
  return html`<p class="notice" role="status">
    <span aria-hidden="true">!</span> This is the past: ${words}.
  </p>`;
}

function Hottest({ rows, column }) {
  return html`<h3>Most load</h3>
    <${Table}
      caption="Cells with the most load"
      rows=${hottest(rows, 5)}
      keyOf=${(cell) => `${cell.row} ${cell.column}`}
      empty="No load is known."
      columns=${[
        numeric("Layer", (cell) => cell.row),
        numeric(column === "rank" ? "Rank" : "Expert", (cell) => cell.column),
        numeric("Load / mean", (cell) => number(cell.load, 2)),
      ]}
    />`;
}

/** One layer: experts to slots, and the moves of a plan that waits or runs. */
function Slots({ api, name, deployment, loads, layer }) {
  const path = deploymentPath(name);
  const epoch = deployment?.epoch ?? null;
  const placed = usePoll(api, epoch === null ? null : `${path}/placement`, 0, epoch);
  const placement = placed.data;
  const plans = [deployment?.active_plan, ...(deployment?.proposals ?? [])];
  const open = plans.find((plan) => plan && plan.base_epoch === epoch);
  const plan = usePoll(api, open ? `${path}/plans/${encodeURIComponent(open.plan_id)}` : null, 0);
  if (!placement)
    return html`<${Section} title="Slots of one layer"
      >${
        deployment && epoch === null
          ? html`<p class="empty">The placement is not known.</p>`
          : html`<${Loaded} poll=${placed} />`
      }<//
    >`;
  const before = placement.physical_to_logical;
  const target = plan.data?.target.physical_to_logical;
  const after =
    target && placement.epoch === plan.data.base_epoch && sameShape(before, target) ? target : null;
  const still = deployment?.proposals && !open ? NO_PLAN : COMMITTED;
  const planNote = `With the moves of plan ${open?.plan_id}, which is ${open?.phase}.`;
  return html`<${Section} title="Slots of one layer" note=${after ? planNote : still}>
    <${Problem} error=${placed.error ?? plan.error} />
    <${LayerSlots}
      key=${layer}
      first=${layer}
      layers=${before.map((_, i) => i)}
      before=${before}
      after=${after}
      slotsPerRank=${placement.slots_per_rank}
      loads=${loads}
    />
  <//>`;
}
