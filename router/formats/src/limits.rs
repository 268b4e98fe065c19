//! Bounds of what a parser holds. Each says what happens to an output that passes it. Together they bound the memory of
//! one parser to about three times [`MAX_HELD`], whatever the model writes.

/// Bytes of a name: of a tool, a parameter or a member, or a call's header. A longer one is no call, and its text is
/// content; if the call has begun, it breaks it.
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
