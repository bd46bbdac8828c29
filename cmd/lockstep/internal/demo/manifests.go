package demo

import (
	"os"
	"path/filepath"
	"strconv"
)

// object is one of Kubernetes, as JSON.
type object = map[string]any

// restartAttempt is JobSet's label of a pod's attempt.
const restartAttempt = "jobset.sigs.k8s.io/restart-attempt"

// fenceLease bounds how long ranks run on whose node does not hear the master: after it there is
// proof that they have ended.
const fenceLease = "5s"

func (k *kubernetesSite) namespace() object {
	return object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{
		"name": k.job, "labels": object{"pod-security.kubernetes.io/enforce": "privileged", "app.kubernetes.io/name": "lockstep-demo"},
	}}
}

// pod is what agents and ranks have in common: this program and its data by the shared folder,
// the recorders by the node's memory, and the node's network.
func (k *kubernetesSite) pod(container object) object {
	container["name"], container["image"], container["imagePullPolicy"] = "c", k.image, "IfNotPresent"
	container["volumeMounts"] = []object{{"name": "shared", "mountPath": k.dir}, {"name": "shm", "mountPath": "/dev/shm"}}
	container["resources"] = object{"requests": object{"cpu": "50m", "memory": "64Mi"}}
	return object{
		"hostNetwork": true, "terminationGracePeriodSeconds": 1, "enableServiceLinks": false, "automountServiceAccountToken": false,
		"containers": []object{container},
		"volumes": []object{
			{"name": "shared", "hostPath": object{"path": k.dir, "type": "Directory"}},
			{"name": "shm", "hostPath": object{"path": "/dev/shm", "type": "Directory"}},
		},
		"affinity": object{"nodeAffinity": object{"requiredDuringSchedulingIgnoredDuringExecution": object{"nodeSelectorTerms": []object{{
			"matchExpressions": []object{{"key": "kubernetes.io/hostname", "operator": "In", "values": k.names()}},
		}}}}},
	}
}

func variable(name, value string) object { return object{"name": name, "value": value} }

func fromField(name, path string) object {
	return object{"name": name, "valueFrom": object{"fieldRef": object{"fieldPath": path}}}
}

// agents see the ranks of their node, which are in other pods.
func (k *kubernetesSite) agents(c *cluster) object {
	cert := filepath.Join(k.dir, "pki", "agent-$(LOCKSTEP_NODE)")
	pod := k.pod(object{
		"command": []string{
			filepath.Join(k.dir, "lockstep"), "agent", "--runtime-dir", nodeDir(k.job, "$(LOCKSTEP_NODE)"), "--share-runtime-dir", "--master", k.job + "=" + c.masterGRPC,
			"--web.listen-address", "127.0.0.1:0", "--tls.cert", cert + ".crt", "--tls.key", cert + ".key", "--tls.ca", filepath.Join(k.dir, "pki", "ca.crt"),
		},
		"env":             []object{fromField("LOCKSTEP_NODE", "spec.nodeName")},
		"securityContext": object{"runAsUser": 0, "privileged": true}, // it looks into processes of other pods
	})
	pod["hostPID"] = true
	labels := object{"app": "agent"}
	return object{
		"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": object{"name": "agent", "namespace": k.job},
		"spec": object{"selector": object{"matchLabels": labels}, "template": object{"metadata": object{"labels": labels}, "spec": pod}},
	}
}

// ranks are a JobSet of one Job: one a node, and a node more where one is left out.
func (k *kubernetesSite) ranks(c *cluster) object {
	attempt := "metadata.labels['" + restartAttempt + "']"
	train := c.trainCommand(k.shape, filepath.Join(k.dir, "train"), 0, c.pace)[1:]
	pod := k.pod(object{
		"command": append(append([]string{filepath.Join(k.dir, "lockstep")}, train...), "--meet", k.dir, "--address", "$(HOST_IP)"),
		"env": []object{
			fromField("LOCKSTEP_NODE", "spec.nodeName"), fromField("HOST_IP", "status.hostIP"), fromField("LOCKSTEP_RESTART_COUNT", attempt), fromField("JOBSET_RESTART_ATTEMPT", attempt),
			fromField("LOCKSTEP_RANK", "metadata.annotations['batch.kubernetes.io/job-completion-index']"), variable("LOCKSTEP_WORLD_SIZE", strconv.Itoa(k.shape.world())),
			variable("LOCKSTEP_LOCAL_RANK", "0"), variable("LOCKSTEP_JOB", k.job), variable("MASTER_PORT", "29507"), variable("LOCKSTEP_NET", "tcp"),
			variable("LOCKSTEP_RUNTIME_DIR", nodeDir(k.job, "$(LOCKSTEP_NODE)")), variable("LOCKSTEP_FAULT_DIR", filepath.Join(nodeDir(k.job, "$(LOCKSTEP_NODE)"), "faults")),
			variable("LOCKSTEP_SECRET_FILE", filepath.Join(k.dir, "secret")), variable("LOCKSTEP_FENCE", "stop"), variable("LOCKSTEP_FENCE_LEASE", fenceLease), variable("LOCKSTEP_FENCE_GRACE", "0s"),
		},
		"securityContext": object{"runAsUser": os.Getuid(), "runAsGroup": os.Getgid()},
	})
	pod["restartPolicy"] = "Never"
	pod["affinity"].(object)["podAntiAffinity"] = object{"requiredDuringSchedulingIgnoredDuringExecution": []object{{
		"topologyKey": "kubernetes.io/hostname", "labelSelector": object{"matchLabels": object{"lockstep.dev/job": k.job}},
	}}}
	n := k.shape.world()
	return object{
		"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": object{"name": k.job, "namespace": k.job},
		"spec": object{
			"failurePolicy": object{"maxRestarts": 100, "restartStrategy": "BlockingRecreate"},
			"replicatedJobs": []object{{"name": "w", "replicas": 1, "template": object{"spec": object{
				"parallelism": n, "completions": n, "completionMode": "Indexed", "backoffLimit": 0,
				"template": object{"metadata": object{"labels": object{"lockstep.dev/job": k.job}}, "spec": pod},
			}}}},
		},
	}
}
