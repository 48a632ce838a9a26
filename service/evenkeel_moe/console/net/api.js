/** The client of the REST API: adds the token, asks only for what has changed. */

import { RequestError } from "../lib/problem.js";

const TIMEOUT_MS = 20_000;
const MOST_KEPT = 60;

export class Api {
  /**
   * @param {string} token
   * @param {(words: string) => void} [refused] called if the token is no longer accepted
   */
  constructor(token, refused = () => {}) {
    this.token = token;
    this.refused = refused;
    /** Seconds by which the controller's clock is ahead of this machine's. */
    this.skew = 0;
    /** Newest answer of each path, with its entity tag. */
    this.kept = new Map();
  }

  /** @returns {number} The controller's time, Unix seconds. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  /**
   * @param {string} path such as `deployments`; relative to `v1/`
   * @param {number} [timeoutMs]
   * @returns {Promise<any>} The body. It is the same object as before if nothing changed.
   * @throws {RequestError}
   */
  async get(path, timeoutMs = TIMEOUT_MS) {
    const kept = this.kept.get(path);
    const headers = kept ? { "If-None-Match": kept.tag } : {};
    const response = await this.send("GET", path, headers, undefined, timeoutMs);
    if (response.status === 304 && kept) return kept.body;
    const body = await response.json();
    const tag = response.headers.get("ETag");
    this.kept.delete(path);
    if (tag) this.kept.set(path, { tag, body });
    if (this.kept.size > MOST_KEPT) this.kept.delete(this.kept.keys().next().value);
    return body;
  }

  /** @param {string} path @returns {string | undefined} The entity tag of the newest answer. */
  tagOf(path) {
    return this.kept.get(path)?.tag;
  }

  /**
   * Sends a change. Every POST has a key of its own, so that a repetition by the network changes
   * nothing twice.
   *
   * @param {string} method
   * @param {string} path
   * @param {object} [body]
   * @param {Record<string, string>} [headers]
   * @returns {Promise<any>} The body of the answer; null if it has none.
   * @throws {RequestError}
   */
  async change(method, path, body, headers = {}) {
    const all = { ...headers };
    if (method === "POST") all["Idempotency-Key"] = randomId();
    if (body !== undefined) all["Content-Type"] = "application/json";
    const sent = body === undefined ? undefined : JSON.stringify(body);
    const response = await this.send(method, path, all, sent);
    return response.status === 204 ? null : response.json();
  }

  async send(method, path, headers, body, timeoutMs = TIMEOUT_MS) {
    const url = new URL(`v1/${path}`, document.baseURI);
    const all = { ...headers, Authorization: `Bearer ${this.token}` };
    let response;
    try {
      const signal = AbortSignal.timeout(timeoutMs);
      response = await fetch(url, { method, headers: all, body, signal, cache: "no-store" });
    } catch (error) {
      const late = error.name === "TimeoutError" ? { waited_s: timeoutMs / 1000 } : null;
      throw new RequestError(0, late);
    }
    const date = Date.parse(response.headers.get("Date") ?? "");
    if (Number.isFinite(date)) this.noteClock(date / 1000);
    if (response.ok || response.status === 304) return response;
    const problem = await response.json().catch(() => null);
    const error = new RequestError(response.status, problem);
    if (response.status === 401) this.refused(error.message);
    throw error;
  }

  /** The header has whole seconds, so that smaller differences say nothing. */
  noteClock(unix) {
    const skew = unix + 0.5 - Date.now() / 1000;
    this.skew = Math.abs(skew) > 2 ? skew : 0;
  }
}

function randomId() {
  const words = crypto.getRandomValues(new Uint32Array(4));
  return `console-${[...words].map((word) => word.toString(16).padStart(8, "0")).join("")}`;
}

/** @param {string} name @returns {string} The path of a deployment. */
export function deploymentPath(name) {
  return `deployments/${encodeURIComponent(name)}`;
}
