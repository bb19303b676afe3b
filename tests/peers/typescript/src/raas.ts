// A toy RaaS: pulls and verifies every version, and samples bytes at random all the same.
//
//     node dist/src/raas.js --hub HOST:PORT --token TOKEN [--policy solver] [--workflow single_turn]

import { FinishReason } from "../gen/astraflow/rollout/v1/trajectory_pb.js";
import type { RolloutTask } from "../gen/astraflow/rollout/v1/task_pb.js";
import { options } from "./member.js";
import { type Sample, serve } from "./node.js";

function answer({ prompt, sampling }: RolloutTask): Sample {
  const said = [...prompt!.dataJson];
  const sampled = Array.from({ length: sampling[options.policy]!.maxNewTokens }, () => Math.floor(Math.random() * 256));
  const logprobs = sampled.map(() => -Math.log(256));
  return { tokens: [...said, ...sampled], promptLength: said.length, logprobs, reward: Math.random(), finish: FinishReason.LENGTH };
}

await serve({ name: `toy-${process.pid}`, codes: [options.workflow, "exact"], capacity: 8, answer });
