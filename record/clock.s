// Empty on purpose: a package with a bodyless function (clock.go) needs an
// assembly file.
