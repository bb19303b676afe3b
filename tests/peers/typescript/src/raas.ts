// A toy RaaS: pulls and verifies every version, and samples bytes at random all the same.
//
//     node dist/src/raas.js --hub HOST:PORT --token TOKEN [--policy solver] [--workflow single_turn]

import type { MessageInitShape } from "@bufbuild/protobuf";
import { timestampDate } from "@bufbuild/protobuf/wkt";
import { Reason } from "../gen/astraflow/common/v1/failure_pb.js";
import { DirectiveKind } from "../gen/astraflow/common/v1/session_pb.js";
import { Dtype } from "../gen/astraflow/common/v1/tensor_pb.js";
import { RaasService, type RolloutItemSchema, type StreamRolloutsRequestSchema, type StreamTasksRequestSchema } from "../gen/astraflow/dataflow/v1/raas_service_pb.js";
import { Outcome } from "../gen/astraflow/rollout/v1/rollout_pb.js";
import type { RolloutTask } from "../gen/astraflow/rollout/v1/task_pb.js";
import { FinishReason } from "../gen/astraflow/rollout/v1/trajectory_pb.js";
import { type VersionInfo, VersionState } from "../gen/astraflow/weights/v1/version_pb.js";
import { VersionService } from "../gen/astraflow/weights/v1/version_service_pb.js";
import { hasFault, Member, options, pause } from "./member.js";
import { Queue } from "./queue.js";
import { Replica } from "./replica.js";

type Steering = MessageInitShape<typeof StreamTasksRequestSchema>;
type Sent = MessageInitShape<typeof StreamRolloutsRequestSchema>;
type Item = MessageInitShape<typeof RolloutItemSchema>["item"];
const CAPACITY = 8;
const policyId = options.policy;

let rolloutCount = 0;
const replica = new Replica();
const tasks = new Set<string>();
const unacked = new Map<string, Item>();
const outbox = new Queue<Item>();
const steering = new Queue<Steering>();

const member = new Member(
  async (resume, call) => {
    const codes = [{ name: options.workflow }, { name: "exact" }];
    const policies = [{ policyId, maxContextTokenCount: 4096n, ...replica.held() }];
    const contract = { contractVersion: 1, software: "toy-typescript" };
    const request = { name: `toy-${process.pid}`, contract, resume, capacity: CAPACITY, policies, codes };
    return (await run.joinPool(request, { ...call, timeoutMs: 5000 })).session;
  },
  () => ({ heldTaskIds: [...tasks] }),
  () => ({ case: "raas", value: { inflightCount: tasks.size, capacity: CAPACITY } }),
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
  yield { request: { case: "open", value: { credit: { maxOutstanding: CAPACITY } } } };
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

function sample({ taskId, groupId, prompt, sampling }: RolloutTask, sampleIndex: number) {
  const rolloutId = `rollout-${process.pid}-${++rolloutCount}`;
  const said = prompt!.dataJson;
  const count = sampling[policyId]?.maxNewTokens || 8;
  const ids = Int32Array.from([...said, ...Array.from({ length: count }, () => Math.floor(Math.random() * 256))]);
  const shape = [BigInt(ids.length)];
  const mask = Uint8Array.from(ids, (_, at) => Number(at >= said.length));
  const logprobs = Float32Array.from(mask, (isSampled) => (isSampled ? -Math.log(256) : 0));
  const bytes = (array: Int32Array | Float32Array): Uint8Array => new Uint8Array(array.buffer);
  const trajectory = {
    trajectoryId: `${rolloutId}-0`,
    policyId,
    tokens: { dtype: Dtype.I32, shape, data: bytes(ids) },
    sampledMask: { dtype: Dtype.BOOL, shape, data: mask },
    logprobs: { dtype: Dtype.F32, shape, data: bytes(logprobs) },
    versionSpans: [{ version: replica.version!, length: count }],
    sampling: { temperature: 1, maxNewTokens: count },
    finishReason: FinishReason.LENGTH,
    engine: "random",
  };
  const policyVersions = { [policyId]: replica.version! };
  return { rolloutId, taskId, groupId, sampleIndex, outcome: Outcome.SCORED, reward: Math.random(), trajectories: [trajectory], policyVersions };
}

async function takeTasks(): Promise<void> {
  for await (const { event } of member.stream((call, signal) => run.streamTasks(openTasks(signal), call))) {
    if (event.case === "task") {
      tasks.add(event.value.taskId);
      void work(event.value);
    } else if (event.case === "directive" && event.value.kind !== DirectiveKind.CONTINUE) return;
  }
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

await member.join();
void followVersions();
void deliver();
await takeTasks();
while (tasks.size) await pause(10);
await member.leave("drained");
console.log(JSON.stringify({ rollouts: rolloutCount, version: Number(replica.version ?? -1n) }));
process.exit(0);
