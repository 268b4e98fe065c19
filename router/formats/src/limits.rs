//! Bounds on the text that a parser holds. The comment of each bound says what happens to an output that exceeds it.
//! Together, the bounds limit the memory of one parser to about three times [`MAX_HELD`], whatever the model writes.

/// Maximum bytes of the name of a tool, a parameter or a member, or of a call's header. Text with a longer one is
/// content and no call. If the call has begun already, the longer one breaks the call.
pub const MAX_NAME: usize = 1 << 10;

/// Bytes of a value that is held until it is whole: of arguments that stand before the name of their call, which is
/// then no call, and of a parameter that is not a string, which then becomes one.
pub const MAX_HELD: usize = 64 << 10;

/// Bytes of white space inside a call, outside its values. More breaks the call. Also the bytes of white space that
/// wait for what follows outside calls. More is passed on.
pub const MAX_BLANK: usize = 256;

/// Nesting of Python literals. Deeper ones break their call. The nesting of JSON has no bound, because it is counted
/// and not stored.
pub const MAX_DEPTH: usize = 128;
