// Package kubelab is a Kubernetes cluster of real kubelets on one machine, for tests; it needs
// root. The scripts build it, start it and break it; this package calls them for tests in Go.
//
// In: the scripts of this folder and the programs that build has made. Out: a [Lab], on which
// kubectl runs and nodes lose their power, their link or their kubelet.
package kubelab
