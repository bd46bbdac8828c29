// Package remediation turns alerts into actions, carefully.
//
// In flows Alertmanager's webhook (version 4, authenticated); out flow calls to
// an Actuator that restarts a job or excludes a rank. In between stand, in
// this order:
//
//	webhook   authenticate, decode leniently, refuse partial views
//	journal   every alert that may lead to something is on disk before the
//	          webhook is answered, and every decision before it is carried out
//	policy    which class and level lead to which action
//	breaker   rate, share of units, absolute bound; stays open until a person closes it
//	actuator  carries it out; told the action's id so that a repeat is harmless
//
// A remediator that is killed at any point takes up its journal again: nothing
// is lost, and since actions carry ids, nothing is done twice. Dry run is the
// default. The package decides nothing about what is wrong: that is the
// master's verdict, and it travels in the alert's labels.
package remediation
