// What every member of a run does: join, keep its session alive, repeat what was cut.

import { parseArgs } from "node:util";
import { type Client, type CallOptions, Code, ConnectError, createClient, encodeBinaryHeader } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import type { DescService, MessageInitShape } from "@bufbuild/protobuf";
import { reasonOf } from "./errors.js";
import { DirectiveKind, type Session, type SessionResumeSchema } from "../gen/astraflow/common/v1/session_pb.js";
import { type KeepAliveRequestSchema, SessionService } from "../gen/astraflow/dataflow/v1/session_service_pb.js";

export type Resume = MessageInitShape<typeof SessionResumeSchema> | undefined;
export type Load = MessageInitShape<typeof KeepAliveRequestSchema>["load"];

const named = { type: "string" } as const;
export const options = parseArgs({
  options: {
    hub: named,
    token: named,
    policy: { ...named, default: "solver" },
    workflow: { ...named, default: "single_turn" },
    fault: { ...named, default: "" },
  },
}).values;
export const hasFault = (name: string): boolean => options.fault === name;
export const pause = (ms: number): Promise<void> => new Promise((done) => setTimeout(done, ms));

const JOIN = { headers: { authorization: `Bearer ${options.token}` } };
const CUT = [Code.Unavailable, Code.Aborted, Code.Canceled, Code.Internal, Code.Unknown, Code.DeadlineExceeded];
const PATIENCE_MS = 10_000;

export class Member {
  session!: Session;
  directive = DirectiveKind.CONTINUE;
  private readonly transport = createGrpcTransport({ baseUrl: `http://${options.hub}` });
  // A connection of its own: bulk must not delay a KeepAlive.
  private readonly pulse = createGrpcTransport({ baseUrl: `http://${options.hub}` });
  private timer?: NodeJS.Timeout;
  private joining?: Promise<void> | undefined;

  constructor(
    private readonly open: (resume: Resume, call: CallOptions) => Promise<Session | undefined>,
    private readonly held: () => Resume,
    private readonly load: () => Load,
  ) {}

  client<T extends DescService>(service: T): Client<T> {
    return createClient(service, this.transport);
  }

  // Several calls may find out at once that the session ended.
  join(): Promise<void> {
    return (this.joining ??= this.enter().finally(() => (this.joining = undefined)));
  }

  private async enter(): Promise<void> {
    const held = this.session && { resumeToken: this.session.token, incarnation: 1n, ...this.held() };
    this.session = (await this.open(held, JOIN))!;
    clearInterval(this.timer);
    const interval = this.session.keepAliveInterval!;
    const ms = Number(interval.seconds) * 1000 + interval.nanos / 1e6;
    this.timer = setInterval(() => void this.keepAlive(), ms);
  }

  private async keepAlive(): Promise<void> {
    const answer = await createClient(SessionService, this.pulse)
      .keepAlive({ load: this.load() }, { ...this.auth(), timeoutMs: 5000 })
      .catch(() => undefined); // the next one, or another call, finds out why
    if (answer?.directive) this.directive = answer.directive.kind;
    if (answer?.transferToken.length) this.session.transferToken = answer.transferToken;
  }

  auth(): CallOptions {
    return { headers: { "astraflow-session-bin": encodeBinaryHeader(this.session.token) } };
  }

  // Repeat a call while the run cannot be reached; join again when the session ended.
  async call<T>(make: (call: CallOptions) => Promise<T>): Promise<T> {
    for (const end = Date.now() + PATIENCE_MS; ; ) {
      const { session } = this;
      try {
        return await make({ ...this.auth(), timeoutMs: 5000 });
      } catch (error) {
        await this.mend(error, end, session);
      }
    }
  }

  // Read a stream to its end; a cut one is opened again. The signal ends what is sent on it. Reconciles: after
  // joining again, by which the run finds out what the cut swallowed.
  async *stream<T>(make: (call: CallOptions, signal: AbortSignal) => AsyncIterable<T>, { reconciles = false } = {}): AsyncGenerator<T> {
    for (let end = Date.now() + PATIENCE_MS; ; ) {
      const open = new AbortController();
      const { session } = this;
      const began = Date.now();
      try {
        for await (const event of make(this.auth(), open.signal)) {
          end = Date.now() + PATIENCE_MS;
          yield event;
        }
        return;
      } catch (error) {
        // One that stood for long was no failure to open it.
        if (Date.now() - began > PATIENCE_MS) end = Date.now() + PATIENCE_MS;
        await this.mend(error, end, session);
        if (reconciles && session === this.session) await this.join().catch(() => undefined); // the next call says why
      } finally {
        open.abort();
      }
    }
  }

  // Joins anew unless another call did since: a second time would end what that one opened.
  private async mend(error: unknown, end: number, session: Session): Promise<void> {
    if (!(error instanceof ConnectError) || Date.now() > end) throw error;
    if (reasonOf(error) === "SESSION_ENDED") return session === this.session ? await this.join() : undefined;
    if (reasonOf(error) ? reasonOf(error) !== "NOT_READY" : !CUT.includes(error.code)) throw error;
    await pause(50);
  }

  async leave(message: string): Promise<void> {
    clearInterval(this.timer);
    await this.call((call) => this.client(SessionService).endSession({ message }, call));
  }
}
