// Package browser drives a real Chromium for tests of pages: it opens them, presses keys,
// reads the accessibility tree and takes screenshots.
//
// In flow addresses; out flow what the page shows and what the browser complains of. It
// speaks the DevTools protocol over a pipe, so no port is opened and nothing else can drive
// the browser. It is for tests: a page that is not this project's is not to be opened with it,
// since the browser runs without its sandbox where the test is root.
package browser
