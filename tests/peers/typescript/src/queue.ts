// What is put into it, in order, for whoever reads it at the time.

export class Queue<T> {
  private waiting: T[] = [];
  private wake: () => void = () => {};

  put(...items: T[]): void {
    this.waiting.push(...items);
    this.wake();
  }

  // Until the signal aborts: a stream that was cut leaves nothing behind that reads.
  async *read(signal: AbortSignal): AsyncGenerator<T> {
    while (!signal.aborted) {
      for (let item; !signal.aborted && (item = this.waiting.shift()) !== undefined; ) yield item;
      await new Promise<void>((done) => {
        const wake = (): void => {
          signal.removeEventListener("abort", wake);
          done();
        };
        this.wake = wake;
        signal.addEventListener("abort", wake);
        if (this.waiting.length || signal.aborted) wake();
      });
    }
  }
}
