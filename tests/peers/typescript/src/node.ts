// A RaaS of one policy around an engine of yours: follows versions, takes tasks, delivers rollouts.

import type { MessageInitShape } from "@bufbuild/protobuf";
import { timestampDate } from "@bufbuild/protobuf/wkt";
import { Reason } from "../gen/astraflow/common/v1/failure_pb.js";
import { DirectiveKind } from "../gen/astraflow/common/v1/session_pb.js";
import { Dtype } from "../gen/astraflow/common/v1/tensor_pb.js";
import { RaasService, type RolloutItemSchema, type StreamRolloutsRequestSchema, type StreamTasksRequestSchema } from "../gen/astraflow/dataflow/v1/raas_service_pb.js";
import { Outcome } from "../gen/astraflow/rollout/v1/rollout_pb.js";
import type { RolloutTask } from "../gen/astraflow/rollout/v1/task_pb.js";
import type { FinishReason } from "../gen/astraflow/rollout/v1/trajectory_pb.js";
import { type VersionInfo, VersionState } from "../gen/astraflow/weights/v1/version_pb.js";
import { VersionService } from "../gen/astraflow/weights/v1/version_service_pb.js";
import { hasFault, Member, options, pause } from "./member.js";
import { Queue } from "./queue.js";
import { Replica } from "./replica.js";

type Steering = MessageInitShape<typeof StreamTasksRequestSchema>;
type Sent = MessageInitShape<typeof StreamRolloutsRequestSchema>;
type Item = MessageInitShape<typeof RolloutItemSchema>["item"];

// A prompt and what was sampled after it; log-probabilities of what was sampled alone.
export type Sample = { tokens: number[]; promptLength: number; logprobs: number[]; reward: number; finish: FinishReason };

// Codes are the workflows and scorers of the recipe that answer stands for: the engine and the scorer, which
// samples one rollout of a task with the weights that are held.
export type Settings = { name: string; codes: string[]; capacity: number; answer: (task: RolloutTask, held: Replica) => Sample };

const policyId = options.policy;

let settings: Settings;
let rolloutCount = 0;
const replica = new Replica();
const tasks = new Set<string>();
const unacked = new Map<string, Item>();
const outbox = new Queue<Item>();
const steering = new Queue<Steering>();

const member = new Member(
  async (resume, call) => {
    const { name, capacity } = settings;
    const codes = settings.codes.map((code) => ({ name: code }));
    const policies = [{ policyId, maxContextTokenCount: 4096n, ...replica.held() }];
    const contract = { contractVersion: 1, software: "astraflow-typescript" };
    const request = { name, contract, resume, capacity, policies, codes };
    return (await run.joinPool(request, { ...call, timeoutMs: 5000 })).session;
  },
  () => ({ heldTaskIds: [...tasks] }),
  () => ({ case: "raas", value: { inflightCount: tasks.size, capacity: settings.capacity } }),
);
const run = member.client(RaasService);
const ledger = member.client(VersionService);

async function report(version: bigint, state: VersionState, reason?: Reason, message = ""): Promise<void> {
  const failure = reason && { failure: { reason, message, retryable: true } };
  await member.call((call) => ledger.reportVersion({ policyId, version, state, ...failure }, call));
}

// A patch from what is held first, everything anew when that does not verify or is no longer kept.
async function follow(info: VersionInfo): Promise<void> {
  const places = info.sources.filter(({ endpoint }) => endpoint).flatMap(({ endpoint }) => [{ endpoint, isAnew: false }, { endpoint, isAnew: true }]);
  for (const place of places) {
    const { versions } = await member.call((call) => ledger.listVersions({ policyId }, call));
    const announced = versions.flatMap((each) => each.patches);
    try {
      await replica.pull(info, { ...place, announced, token: member.session.transferToken });
      return await report(info.version, VersionState.LIVE);
    } catch (error) {
      if (place.isAnew) await report(info.version, VersionState.FAILED, Reason.DIGEST_MISMATCH, String(error));
    }
  }
}

async function followVersions(): Promise<void> {
  for await (const { version: info } of member.stream((call) => ledger.watchVersions({ policyId }, call)))
    if (info && (replica.version === undefined || info.version > replica.version)) await follow(info);
}

async function* openTasks(signal: AbortSignal): AsyncGenerator<Steering> {
  yield { request: { case: "open", value: { credit: { maxOutstanding: settings.capacity } } } };
  yield* steering.read(signal);
}

async function work(task: RolloutTask): Promise<void> {
  const range = task.versions[policyId];
  while (range?.min !== undefined && (replica.version === undefined || replica.version < range.min)) await pause(10);
  const isLate = task.deadline !== undefined && timestampDate(task.deadline) < new Date();
  const reason = hasFault("lies_about_capacity") ? Reason.CAPACITY_EXCEEDED : isLate ? Reason.TASK_EXPIRED : range?.max !== undefined && replica.version! > range.max ? Reason.VERSION_NOT_SERVED : undefined;
  if (reason !== undefined) {
    tasks.delete(task.taskId);
    return steering.put({ request: { case: "nack", value: { taskId: task.taskId, failure: { reason } } } });
  }
  for (const sampleIndex of task.sampleIndexes) outbox.put({ case: "rollout", value: sample(task, sampleIndex) });
  outbox.put({ case: "result", value: { taskId: task.taskId, rolloutCount: task.sampleIndexes.length } });
}

function sample(task: RolloutTask, sampleIndex: number) {
  const { taskId, groupId } = task;
  const rolloutId = `rollout-${process.pid}-${++rolloutCount}`;
  const version = replica.version!;
  const { tokens, promptLength, logprobs, reward, finish } = settings.answer(task, replica);
  const shape = [BigInt(tokens.length)];
  const bytes = (array: Int32Array | Float32Array): Uint8Array => new Uint8Array(array.buffer);
  const prompt = new Array(promptLength).fill(0);
  const trajectory = {
    trajectoryId: `${rolloutId}-0`,
    policyId,
    tokens: { dtype: Dtype.I32, shape, data: bytes(Int32Array.from(tokens)) },
    sampledMask: { dtype: Dtype.BOOL, shape, data: Uint8Array.from(tokens, (_, at) => Number(at >= promptLength)) },
    logprobs: { dtype: Dtype.F32, shape, data: bytes(Float32Array.from([...prompt, ...logprobs])) },
    versionSpans: [{ version, length: tokens.length - promptLength }],
    sampling: task.sampling[policyId]!,
    finishReason: finish,
    engine: settings.name,
  };
  const policyVersions = { [policyId]: version };
  return { rolloutId, taskId, groupId, sampleIndex, outcome: Outcome.SCORED, reward, trajectories: [trajectory], policyVersions };
}

// Until the run asks the node to leave: at once, or when all is closed.
async function takeTasks(): Promise<void> {
  for await (const { event } of member.stream((call, signal) => run.streamTasks(openTasks(signal), call), { reconciles: !hasFault("never_reconciles") })) {
    if (event.case === "task") {
      tasks.add(event.value.taskId);
      void work(event.value);
    } else if (event.case === "directive" && event.value.kind === DirectiveKind.STOP) return;
    else if (event.case === "directive" && event.value.kind === DirectiveKind.DRAIN) break;
  }
  while (tasks.size) await pause(10);
}

const idOf = (item: Item): string => (item!.case === "rollout" ? item!.value.rolloutId! : item!.case === "result" ? item!.value.taskId! : "");

// What was not acknowledged is sent first on a new stream.
async function* sendItems(signal: AbortSignal): AsyncGenerator<Sent> {
  if (unacked.size && !hasFault("never_resends")) yield { items: [...unacked.values()].map((item) => ({ item: item! })) };
  for await (const item of outbox.read(signal)) {
    unacked.set(idOf(item), item);
    yield { items: hasFault("repeats_itself") ? [{ item: item! }, { item: item! }] : [{ item: item! }] };
  }
}

async function deliver(): Promise<void> {
  for await (const { acks } of member.stream((call, signal) => run.streamRollouts(sendItems(signal), call)))
    for (const { itemId } of acks) {
      unacked.delete(itemId);
      tasks.delete(itemId);
    }
}

// Works until the run asks it to leave.
export async function serve(given: Settings): Promise<void> {
  settings = given;
  await member.join();
  void followVersions();
  void deliver();
  await takeTasks();
  await member.leave("as asked");
  console.log(JSON.stringify({ rollouts: rolloutCount, version: Number(replica.version ?? -1n) }));
  process.exit(0);
}
