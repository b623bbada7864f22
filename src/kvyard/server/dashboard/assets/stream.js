// The connection: server-sent events over fetch, because an EventSource can't send a token. Comes back by itself, ever slower.
const SILENCE = 15000; // milliseconds without a byte after which a connection counts as lost
const FIRST = 500;
const LONGEST = 15000;

export class Stream {
  /** `heard(event, value)` gets what comes; `state(name, more)` is told: connecting, live, waiting (until when, why), token. */
  constructor(url, { heard, state }) {
    this.url = url;
    this.heard = heard;
    this.state = state;
    this.token = null;
    this.delay = FIRST;
    this.timer = null;
    this.control = null;
  }

  start() {
    clearTimeout(this.timer);
    if (this.control) this.control.abort();
    this.run(this.control = new AbortController());
  }

  async run(control) {
    this.state("connecting");
    let why = "the connection ended";
    let wait = 0;
    const watch = { at: setTimeout(() => control.abort(), SILENCE) };
    const alive = () => { clearTimeout(watch.at); watch.at = setTimeout(() => control.abort(), SILENCE); };
    try {
      const headers = { Accept: "text/event-stream" };
      if (this.token) headers.Authorization = `Bearer ${this.token}`;
      const reply = await fetch(this.url, { headers, signal: control.signal, cache: "no-store", credentials: "same-origin" });
      if (reply.status === 401) {
        clearTimeout(watch.at);
        if (this.control === control) this.state("token", this.token ? "That token is wrong." : "");
        return;
      }
      if (!reply.ok) {
        wait = 1000 * (Number(reply.headers.get("Retry-After")) || 0);
        const said = await reply.json().catch(() => ({}));
        throw new Error(typeof said.error === "string" ? said.error : `the server answered ${reply.status}`);
      }
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        alive();
        text += value;
        let end;
        while ((end = text.indexOf("\n\n")) >= 0) {
          this.take(text.slice(0, end));
          text = text.slice(end + 2);
        }
      }
    } catch (error) {
      why = control.signal.aborted ? "nothing was received" : error instanceof TypeError ? "the server can't be reached" : error.message;
    }
    clearTimeout(watch.at);
    if (this.control !== control) return; // it was started again
    wait = Math.max(wait, this.delay * (0.75 + Math.random() / 2));
    this.delay = Math.min(LONGEST, this.delay * 2);
    this.timer = setTimeout(() => this.start(), wait);
    this.state("waiting", { until: Date.now() + wait, why });
  }

  take(block) {
    let event = "message", data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) event = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!data) return;
    this.delay = FIRST;
    this.state("live");
    this.heard(event, JSON.parse(data));
  }
}
