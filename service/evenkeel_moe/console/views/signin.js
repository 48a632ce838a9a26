/** Asks for the token. It stays in this tab's session storage and is sent as a header. */

import { useRef } from "../vendor/hooks.js";
import { html, useTitle } from "../ui.js";

/** @param {{onToken: (token: string) => void, notice: string | null}} props */
export function SignIn({ onToken, notice }) {
  const input = useRef(null);
  useTitle("Sign in – Evenkeel");
  const submit = (event) => {
    event.preventDefault();
    const token = input.current.value.trim();
    if (token) onToken(token);
  };
  return html`<main class="signin">
    <h1><img src="console/icon.svg" alt="" width="40" height="40" />Evenkeel</h1>
    <form class="card" onSubmit=${submit}>
      <label for="token">Token of the operators' API</label>
      <input
        id="token"
        ref=${input}
        type="password"
        autocomplete="off"
        spellcheck="false"
        autofocus
        required
      />
      ${notice ? html`<p class="problem" role="alert">${notice}</p>` : ""}
      <button type="submit" class="button primary">Sign in</button>
      <p class="hint">
        The controller's token file holds it: the setting <code>rest.token_file</code>, or the file
        ${" "}<code>tokens</code> in the data folder. It stays in this tab until the tab is closed.
      </p>
    </form>
  </main>`;
}
