// What each reason of expertd_refusals_total means.

export const REASONS = {
  body_timeout: "the body did not arrive in time",
  body_too_large: "the body is larger than max_body_bytes",
  client_gone: "the client disconnected before its answer",
  forbidden: "the API key lacks the right",
  internal_error: "the server failed: see its log",
  invalid_request: "a tensor or parameter is wrong",
  json_too_large: "the JSON is larger than max_json_bytes",
  memory_full: "no memory is left for bodies and outputs",
  not_ready: "the server, its ranks or the layer are not ready",
  queue_full: "too much waits already",
  queue_timeout: "the request's own timeout would pass, or has",
  shutting_down: "the server is ending",
  step_failed: "the step raised: see the log",
  too_many_tokens: "more than max_request_tokens",
  unauthorized: "no API key, or an unknown one",
  unknown_model: "no such layer, or it is not loaded",
  unsupported_encoding: "Content-Encoding is not gzip or deflate",
};
