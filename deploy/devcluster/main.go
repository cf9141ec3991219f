// Command devcluster is a Kubernetes control plane for development and tests in one binary: its first argument
// says whether it runs as etcd, kube-apiserver or kube-controller-manager. The first two are the real commands;
// the third starts the real controllers that spur-events depends on, and no others (controllers.go).
//
// Built and started by src/spur_events/local/build.py and controlplane.py.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	program := os.Args[1]
	os.Args = os.Args[1:] // each command reads its flags from here
	switch program {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(newControllerManagerCommand()))
	default:
		usage()
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: devcluster etcd|kube-apiserver|kube-controller-manager [flags]")
	os.Exit(2)
}
