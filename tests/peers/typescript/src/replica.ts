// What a RaaS holds of a policy: one verified version, and the way to the next.

import { createClient, encodeBinaryHeader } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import type { Layout } from "../gen/astraflow/weights/v1/layout_pb.js";
import { type Chunk, CodecProfile, type PatchInfo } from "../gen/astraflow/weights/v1/patch_pb.js";
import { TransferService } from "../gen/astraflow/weights/v1/transfer_service_pb.js";
import type { VersionInfo } from "../gen/astraflow/weights/v1/version_pb.js";
import { hasFault } from "./member.js";
import { apply, chunkDigest, layoutDigest, same, stateDigest, verifyPlan } from "./weights.js";

type Source = { endpoint: string; token: Uint8Array; announced: PatchInfo[]; isAnew: boolean };
const isTrusting = hasFault("trusts_chunks");

export class Replica {
  version: bigint | undefined;
  private state: Uint8Array | undefined; // the flat state of that version
  private layout: Layout | undefined;

  held(): { version?: bigint } {
    return this.version === undefined ? {} : { version: this.version };
  }

  // The bytes of a tensor of that version, to be read only.
  tensor(name: string): Uint8Array {
    const { offset, nbytes } = this.layout!.tensors.find((tensor) => tensor.name === name)!;
    return this.state!.slice(Number(offset), Number(offset + nbytes));
  }

  // All or nothing: a version that does not verify leaves the one before.
  async pull(info: VersionInfo, { endpoint, token, announced, isAnew }: Source): Promise<void> {
    const source = createClient(TransferService, createGrpcTransport({ baseUrl: `http://${endpoint}` }));
    const call = { headers: { "astraflow-transfer-bin": encodeBinaryHeader(token) }, timeoutMs: 10_000 };
    const { policyId, version, layoutDigest: wanted } = info;
    this.layout ??= (await source.getLayout({ layoutDigest: wanted }, call)).layout!;
    if (!same(layoutDigest(this.layout), wanted)) throw new Error("another layout");
    const held = isAnew ? undefined : this.state;
    const state = held?.slice() ?? new Uint8Array(Number(this.layout.nbytes));
    const base = held && { baseVersion: this.version! };
    const spec = { policyId, version, layoutDigest: wanted, profiles: [CodecProfile.FAST], ...base };
    let digests: Uint8Array[][] = [];
    for await (const { item } of source.pull({ spec }, call)) {
      if (item.case === "plan") {
        verifyPlan(item.value.patches, announced);
        digests = item.value.patches.map((index) => index.chunkDigests);
      } else if (item.case === "chunk") {
        verifyChunk(item.value, digests[item.value.patchIndex]);
        apply(item.value, state); // in the order in which a single source sends them
      }
    }
    if (!isTrusting && !same(stateDigest(this.layout, state), info.contentDigest)) throw new Error("another state");
    [this.state, this.version] = [state, version];
  }
}

function verifyChunk(chunk: Chunk, digests: Uint8Array[] | undefined): void {
  const digest = digests?.[Number(chunk.header!.index)];
  if (!isTrusting && !(digest && same(digest, chunkDigest(chunk)))) throw new Error("a chunk has another digest");
}
