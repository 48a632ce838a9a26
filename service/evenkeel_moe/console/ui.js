/** Small components that the views share. */

import { h } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { LEVELS } from "./lib/ranks.js";
import { ago, moment } from "./lib/format.js";

/** Turns a template into elements. */
export const html = htm.bind(h);

/** A sign with a word: the level can be told without colour. */
export function Level({ level }) {
  const [sign, word] = LEVELS[level];
  return html`<span class="level ${level}"
    ><span class="sign" aria-hidden="true">${sign}</span>${word}</span
  >`;
}

export function Badge({ kind = "plain", children }) {
  return html`<span class="badge ${kind}">${children}</span>`;
}

/** A section with a heading. */
export function Section({ title, note, actions, children }) {
  return html`<section class="card">
    <div class="card-head">
      <h2>${title}</h2>
      ${actions ?? ""}
    </div>
    ${note ? html`<p class="note">${note}</p>` : ""} ${children}
  </section>`;
}

/** Characters of a value that needs the width of the card. */
const LONG = 60;

/** Names and values. `rows` are [name, value, explanation]; rows without a name are left out. */
export function Facts({ rows }) {
  return html`<dl class="facts">
    ${rows
      .filter((row) => row)
      .map(
        ([name, value, hint]) =>
          html`<div key=${name} class=${String(value).length > LONG ? "wide" : ""}>
            <dt>${name}</dt>
            <dd>${value}${hint ? html`<span class="hint">${hint}</span>` : ""}</dd>
          </div>`,
      )}
  </dl>`;
}

/** Figures that the controller tells in words, each with its note. */
export function Figures({ rows }) {
  return html`<${Facts} rows=${rows.map(({ name, value, note }) => [name, value, note])} />`;
}

/** The columns of a table: `of` makes the cell of a row. Numbers stand at the right edge. */
export const plain = (title, of) => ({ title, of, kind: "" });
export const numeric = (title, of) => ({ title, of, kind: "num" });
/** Keeps room for sentences. */
export const wordy = (title, of) => ({ title, of, kind: "text" });

/** A table. It scrolls sideways in its frame, which the keyboard can reach. */
export function Table({ caption, columns, rows, keyOf, empty = "There is none." }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="hidden">
        ${caption}
      </caption>
      <thead>
        <tr>
          ${columns.map((one) => html`<th scope="col" class=${one.kind}>${one.title}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row, i) =>
            html`<tr key=${keyOf ? keyOf(row) : i}>
              ${columns.map((one) => html`<td class=${one.kind}>${one.of(row)}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

export function Moment({ unix, now }) {
  return html`<time class="nowrap" title=${moment(unix)}>${ago(unix, now)}</time>`;
}

/** An error, announced to screen readers. */
export function Problem({ error }) {
  if (!error) return "";
  return html`<p class="problem" role="alert">
    <span aria-hidden="true">✕</span> ${error.message}
  </p>`;
}

/** The newest data, or the reason why there is none. */
export function Loaded({ poll, children }) {
  if (poll.data === null) {
    return poll.error
      ? html`<${Problem} error=${poll.error} />`
      : html`<p class="empty" aria-busy="true">Loading…</p>`;
  }
  return html`${poll.error ? html`<${Problem} error=${poll.error} />` : ""}${children(poll.data)}`;
}

/**
 * A button that asks before it acts. `act` does the work; its error is shown in the dialog, which
 * then stays open or opens again. `ready` is false while there is nothing to confirm. `onOpen` is
 * called when the dialog opens and nothing is being sent.
 */
export function ActionButton({
  label,
  title,
  children,
  act,
  kind = "plain",
  confirm,
  id,
  disabled,
  ready = true,
  onOpen = () => {},
}) {
  const dialog = useRef(null);
  const [state, setState] = useState({ busy: false, error: null });
  const open = () => {
    dialog.current.showModal();
    if (state.busy) return;
    setState({ busy: false, error: null });
    onOpen();
  };
  const run = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null });
    try {
      await act();
      dialog.current?.close();
      setState({ busy: false, error: null });
    } catch (error) {
      setState({ busy: false, error });
      // No page can keep the Escape key from closing a dialog.
      if (dialog.current?.open === false) dialog.current.showModal();
    }
  };
  return html`<button
      type="button"
      class="button ${kind}"
      id=${id}
      disabled=${disabled}
      onClick=${open}
    >
      ${label}
    </button>
    <dialog ref=${dialog} aria-labelledby="${id}-title">
      <form onSubmit=${run}>
        <h2 id="${id}-title">${title}</h2>
        ${children}
        <${Problem} error=${state.error} />
        <div class="buttons">
          <button
            type="submit"
            class="button ${kind}"
            id="${id}-confirm"
            disabled=${state.busy || !ready}
          >
            ${state.busy ? "Sending…" : (confirm ?? label)}
          </button>
          <button
            type="button"
            class="button"
            disabled=${state.busy}
            onClick=${() => dialog.current.close()}
          >
            Close
          </button>
        </div>
      </form>
    </dialog>`;
}

/** Several choices of which one holds, as radio buttons in a row. */
export function Choice({ legend, name, value, options, onChange }) {
  return html`<fieldset class="choice">
    <legend>${legend}</legend>
    ${options.map(
      ([option, label]) =>
        html`<label key=${option}>
          <input
            type="radio"
            name=${name}
            value=${option}
            checked=${option === value}
            onChange=${() => onChange(option)}
          /><span>${label}</span>
        </label>`,
    )}
  </fieldset>`;
}

/** Two bars from zero, with their numbers: before and after. */
export function BeforeAfter({ name, words, before, after, show }) {
  const bar = (kind, word, value) =>
    html`<div class="bar-row">
      <span class="bar-word">${word}</span>
      <span class="bar-track"
        ><span
          class="bar ${kind}"
          style=${{ width: `${Math.max(0, Math.min(1, value ?? 0)) * 100}%` }}
        ></span
      ></span>
      <span class="bar-value">${show(value)}</span>
    </div>`;
  return html`<div>
    <h3>${name}</h3>
    ${bar("now", words[0], before)}${bar("then", words[1], after)}
  </div>`;
}

/** How old the data on the page is. */
export function Freshness({ poll, now }) {
  if (poll.at === null) return "";
  if (!poll.error)
    return html`<span class="fresh"><span class="dot" aria-hidden="true"></span>Live</span>`;
  return html`<span class="fresh stale" role="status"
    >Not live: the newest answer came <${Moment} unix=${poll.at} now=${now}
  /></span>`;
}

/** Sets the title of the page. */
export function useTitle(title) {
  useEffect(() => {
    document.title = title;
  }, [title]);
}
