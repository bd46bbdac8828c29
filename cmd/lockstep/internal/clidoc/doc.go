// Package clidoc is what a shell and man(1) know of the command line: `lockstep
// completion`, `lockstep man`, and the hidden command that completion scripts ask.
//
// In flows kong's model of the commands, their flags and examples; out flow
// candidates for the word under the cursor, a small script for each shell that
// asks for them, and manual pages. Nothing is written down twice: a new flag is
// completed and has its line in a page because it exists. A command whose words kong
// does not know implements [Completer].
package clidoc
