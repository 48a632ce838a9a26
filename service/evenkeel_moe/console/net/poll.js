/** Hooks that keep data of the API current while the page is visible. */

import { useCallback, useEffect, useRef, useState } from "../vendor/hooks.js";

/** Until a request without a period that failed is sent again. */
const RETRY_MS = 5000;

/**
 * @param {import("./api.js").Api} api
 * @param {string | null} path null asks for nothing
 * @param {number} periodMs 0 asks until there is an answer
 * @param {unknown} [version] a change asks again, and keeps the answer until then
 * @returns {{data: any, error: Error | null, at: number | null, reload: () => Promise<boolean>}}
 *   The newest answer stays while later ones fail; `at` is its Unix time.
 */
export function usePoll(api, path, periodMs, version) {
  const [state, setState] = useState({ path, data: null, error: null, at: null });
  const current = useRef(path);
  current.current = path;
  // An answer that was asked for before another one, and comes after it, is out of date: the page
  // would take back what an action has just shown.
  const asked = useRef(0);
  const shownSince = useRef(0);
  const reload = useCallback(async () => {
    if (path === null) return true;
    const number = ++asked.current;
    const isNewest = () => current.current === path && number > shownSince.current;
    try {
      const data = await api.get(path);
      if (!isNewest()) return true;
      shownSince.current = number;
      setState({ path, data, error: null, at: api.now() });
      return true;
    } catch (error) {
      if (!isNewest()) return false;
      setState((old) =>
        old.path === path ? { ...old, error } : { path, data: null, error, at: null },
      );
      return false;
    }
  }, [api, path]);
  useEvery(reload, periodMs, [api, path, version]);
  const shown = state.path === path ? state : { data: null, error: null, at: null };
  return { data: shown.data, error: shown.error, at: shown.at, reload };
}

/**
 * Calls a function now and then again, each time after the last call has ended. Nothing is asked
 * while the page is hidden; it is asked at once when the page is shown again.
 *
 * @param {() => Promise<boolean>} work returns false if it failed
 * @param {number} periodMs 0 calls it until it succeeds once
 * @param {unknown[]} inputs a change begins anew
 */
export function useEvery(work, periodMs, inputs) {
  useEffect(() => {
    let ended = false;
    let timer = 0;
    const tick = async () => {
      clearTimeout(timer);
      const answered = !document.hidden && (await work());
      ended ||= answered && periodMs === 0;
      clearTimeout(timer); // Another call may have ended meanwhile.
      if (!ended) timer = setTimeout(tick, periodMs || RETRY_MS);
    };
    const shown = () => !ended && !document.hidden && tick();
    tick();
    document.addEventListener("visibilitychange", shown);
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, inputs);
}

/** @returns {boolean} True if the reader prefers a dark page; follows changes. */
export function useDark() {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const changed = () => setDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return dark;
}

/**
 * @returns {[{current: any}, number]} A reference for an element, and its width in pixels; 0 before
 *   it is laid out.
 */
export function useWidth() {
  const element = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const seen = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    seen.observe(element.current);
    return () => seen.disconnect();
  }, []);
  return [element, width];
}
