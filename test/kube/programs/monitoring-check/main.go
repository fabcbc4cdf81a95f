// Reads YAML objects of the Prometheus operator and refuses every field that its types do not have.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

func check(document []byte) error {
	var head struct {
		Kind string `json:"kind"`
	}
	if err := yaml.Unmarshal(document, &head); err != nil {
		return err
	}
	var into any
	switch head.Kind {
	case "PodMonitor":
		into = &monitoring.PodMonitor{}
	case "PrometheusRule":
		into = &monitoring.PrometheusRule{}
	default:
		return nil
	}
	if err := yaml.UnmarshalStrict(document, into); err != nil {
		return fmt.Errorf("%s: %w", head.Kind, err)
	}
	fmt.Println(head.Kind)
	return nil
}

func main() {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(os.Stdin))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			err = check(document)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
