// Errors of the contract: a status with google.rpc.ErrorInfo (1: reason, 2: domain, both strings).

import { Code, ConnectError } from "@connectrpc/connect";

const TYPE = "google.rpc.ErrorInfo";

// Empty: no answer of the contract.
export function reasonOf(error: ConnectError): string {
  for (const detail of error.details)
    if ("type" in detail && detail.type === TYPE)
      return new TextDecoder().decode(detail.value.subarray(2, 2 + (detail.value[1] ?? 0)));
  return "";
}

const field = (number: number, text: string): number[] => [(number << 3) | 2, text.length, ...Buffer.from(text)];

export function refusal(code: Code, reason: string, message: string): ConnectError {
  const error = new ConnectError(message, code);
  error.details.push({ type: TYPE, value: Uint8Array.from([...field(1, reason), ...field(2, "astraflow")]) });
  return error;
}
