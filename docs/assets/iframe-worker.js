// Browsers start no worker from a file. In pages opened from a disk this runs the search's worker in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.ready = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        document.body.appendChild(frame);
        const inside = frame.contentWindow;
        inside.importScripts = (...urls) =>
          Promise.all(
            urls.map(
              (each) =>
                new Promise((done) => {
                  const script = inside.document.createElement("script");
                  script.src = new URL(each, url);
                  script.onload = done;
                  inside.document.body.appendChild(script);
                }),
            ),
          );
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(inside);
        inside.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
