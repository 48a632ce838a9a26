/** The console: signs in, follows the address, and shows one view. */

import { render } from "./vendor/preact.js";
import { useCallback, useEffect, useMemo, useState } from "./vendor/hooks.js";
import { parseRoute } from "./lib/route.js";
import { Api } from "./net/api.js";
import { html } from "./ui.js";
import { SignIn } from "./views/signin.js";
import { Fleet } from "./views/fleet.js";
import { Deployment } from "./views/deployment.js";

const KEY = "evenkeel-token";

/** @returns {import("./lib/route.js").Route} The route of the address; follows changes. */
function useRoute() {
  const [route, setRoute] = useState(parseRoute(location.hash));
  useEffect(() => {
    const changed = () => {
      setRoute(parseRoute(location.hash));
      scrollTo(0, 0);
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

function App() {
  const route = useRoute();
  const [token, setToken] = useState(sessionStorage.getItem(KEY));
  const [holder, setHolder] = useState(null);
  const [notice, setNotice] = useState(null);
  const signOut = useCallback((words) => {
    sessionStorage.removeItem(KEY);
    setToken(null);
    setHolder(null);
    setNotice(words);
  }, []);
  const api = useMemo(() => (token ? new Api(token, signOut) : null), [token]);
  const [failed, setFailed] = useState(null);
  useEffect(() => {
    if (!api) return;
    setFailed(null);
    api.get("token").then(setHolder, setFailed);
  }, [api]);
  const signIn = (typed) => {
    sessionStorage.setItem(KEY, typed);
    setNotice(null);
    setToken(typed);
  };
  if (!token) return html`<${SignIn} onToken=${signIn} notice=${notice} />`;
  if (!holder) {
    const words = failed ? failed.message : "Connecting…";
    return html`<main class="signin">
      <p role="status">${words}</p>
      ${failed ? html`<button class="button" onClick=${reload}>Try again</button>` : ""}
    </main>`;
  }
  return html`<${Frame} holder=${holder} signOut=${() => signOut(null)}>
    ${
      route.deployment === null
        ? html`<${Fleet} api=${api} />`
        : html`<${Deployment}
            key=${route.deployment}
            api=${api}
            role=${holder.role}
            route=${route}
          />`
    }
  <//>`;
}

const reload = () => location.reload();

function Frame({ holder, signOut, children }) {
  return html`<header class="top">
      <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
      <a class="brand" href="#/"
        ><img src="console/icon.svg" alt="" width="26" height="26" />Evenkeel</a
      >
      <a href="runbooks/">Runbooks</a>
      <span class="holder">Token <b>${holder.name}</b>, role <b>${holder.role}</b></span>
      <button type="button" class="button small" id="sign-out" onClick=${signOut}>Sign out</button>
    </header>
    <main id="main" tabindex="-1">${children}</main>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

render(html`<${App} />`, document.getElementById("app"));
