// Browsers start no worker for a page that is opened as a file: its search then runs in a frame of the page.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== this.inner) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      this.inner.document.open();
      this.inner.document.write(
        "<script>postMessage = (data) => parent.postMessage(data, '*')</script>" + `<script src="${url}"></script>`
      );
      this.inner.document.close();
      this.ready = new Promise((resolve) => (this.inner.onload = resolve)); // `open` would have taken it off
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  };
