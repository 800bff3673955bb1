//! The fixed texts of the format. The models were trained on them: every byte counts.

/// Begins a prompt.
pub const BOS: &str = "<｜begin▁of▁sentence｜>";
/// Ends an answer.
pub const EOS: &str = "<｜end▁of▁sentence｜>";
/// Begins a user's turn.
pub const USER: &str = "<｜User｜>";
/// Begins an answer.
pub const ASSISTANT: &str = "<｜Assistant｜>";
/// Begins what is true now, such as today's date.
pub const LATEST_REMINDER: &str = "<｜latest_reminder｜>";
/// Begins reasoning.
pub const THINK: &str = "<think>";
/// Ends reasoning, or says that there is none.
pub const END_THINK: &str = "</think>";
/// The token inside every tag of a tool call; the angle brackets around it are ordinary text.
pub const DSML: &str = "｜DSML｜";

/// Begins a block of calls.
pub(super) const OPEN_CALLS: &str = "<｜DSML｜tool_calls>";
/// The same with the blank line that stands between it and the text before.
pub(super) const OPEN_CALLS_WITH_GAP: &str = "\n\n<｜DSML｜tool_calls>";
/// Ends it.
pub(super) const CLOSE_CALLS: &str = "</｜DSML｜tool_calls>";
/// Begins a call; the name and `">` follow.
pub(super) const OPEN_INVOKE: &str = "<｜DSML｜invoke name=\"";
/// Ends a call.
pub(super) const CLOSE_INVOKE: &str = "</｜DSML｜invoke>";
/// Begins a parameter; its name follows, then one of the next two.
pub(super) const OPEN_PARAMETER: &str = "<｜DSML｜parameter name=\"";
/// The value that follows is text as it is.
pub(super) const IS_STRING: &str = "\" string=\"true\">";
/// The value that follows is JSON.
pub(super) const IS_JSON: &str = "\" string=\"false\">";
/// Ends a parameter.
pub(super) const CLOSE_PARAMETER: &str = "</｜DSML｜parameter>";

/// What stands before the tool schemas, one to a line.
pub(super) const TOOLS_BEFORE: &str = "\
## Tools\n\
\n\
You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
\"<｜DSML｜tool_calls>\" block like the following:\n\
\n\
<｜DSML｜tool_calls>\n\
<｜DSML｜invoke name=\"$TOOL_NAME\">\n\
<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n\
...\n\
</｜DSML｜invoke>\n\
<｜DSML｜invoke name=\"$TOOL_NAME2\">\n\
...\n\
</｜DSML｜invoke>\n\
</｜DSML｜tool_calls>\n\
\n\
String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n\
\n\
If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.\n\
\n\
Otherwise, output directly after </think> with tool calls or final response.\n\
\n\
### Available Tool Schemas\n\
\n\
";

/// What stands behind them.
pub(super) const TOOLS_AFTER: &str = "\
\n\
\n\
You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n\
";

/// What stands before the schema of the answer.
pub(super) const RESPONSE_FORMAT: &str = "\
## Response Format:\n\
\n\
You MUST strictly adhere to the following schema to reply:\n\
";

/// Asks for long reasoning: `max` of the preview, `high` since July 2026.
pub(super) const EFFORT_ABSOLUTE: &str = "\
Reasoning Effort: Absolute maximum with no shortcuts permitted.\n\
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n\
Explicitly write out your entire deliberation process, documenting every intermediate step, considered \
alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\
\n\
";

/// Asks for still longer reasoning: `max` since July 2026.
pub(super) const EFFORT_BEYOND: &str = "\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n\
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying \
cause rather than any surface symptom.\n\
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that \
no assumption remains unchecked and no error remains undiscovered.\n\
\n\
";
