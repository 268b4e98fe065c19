//! Bounds on the text that a parser holds. The comment of each bound says what happens to an output that exceeds it.
//! Together, the bounds limit the memory of one parser to about three times [`MAX_HELD`], whatever the model writes.

/// Maximum bytes of the name of a tool, a parameter or a member, or of a call's header. Text with a longer one is
/// content and no call. If the call has begun already, the longer one breaks the call.
pub const MAX_NAME: usize = 1 << 10;

/// Maximum bytes of a value that is held until it is whole. Two values are: arguments before the name of their call,
/// and a parameter that is not a string. Beyond the bound, the text with the first is no call, and the second becomes a
/// string.
pub const MAX_HELD: usize = 64 << 10;

/// Maximum bytes of a run of white space, except inside values. A longer run inside a call breaks the call. A longer
/// run outside of calls is passed on as text; a shorter one is held until the next text shows whether a call begins.
pub const MAX_BLANK: usize = 256;

/// Nesting of Python literals. Deeper ones break their call. The nesting of JSON has no bound, because it is counted
/// and not stored.
pub const MAX_DEPTH: usize = 128;
