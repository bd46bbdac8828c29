// Package docs holds the documents to the code: its tests fail when the map of packages
// (design/architecture.md) lacks one, when a document quotes a name that is no more, and
// when the page of the environment (environment.md) is not what the code reads.
//
// Nothing flows in or out: it has no code but generators and tests.
package docs

//go:generate go run ./internal/environment -o environment.md
